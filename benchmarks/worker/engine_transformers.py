"""transformers' `generate` with a static batch, under the loads of benchmarks.worker.loads.

transformers' `generate_batch`, which batches continuously, is not measured. On a CPU it was slower
than `generate` at 32 requests, and not faster with shared prefixes.
"""

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from benchmarks.worker.loads import Prompts, Times, parse_arguments, serve


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model.eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> Times:
        input_ids = torch.tensor(prompts)
        steps: list[float] = []

        def note_step(token_ids: torch.Tensor, *_: object) -> torch.Tensor:
            steps.append(time.perf_counter())
            return torch.zeros(len(token_ids), dtype=torch.bool)

        token_ids = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note_step]),
        )
        num_generated = token_ids.shape[1] - input_ids.shape[1]
        return [steps[:num_generated] for _ in prompts]

    serve(generate, arguments, f"transformers {version('transformers')}")


if __name__ == "__main__":
    main()
