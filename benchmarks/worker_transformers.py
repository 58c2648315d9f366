"""transformers' generate, a static batch, under the loads of benchmarks.worker_loads."""

import argparse

import torch
from transformers import AutoModelForCausalLM

from benchmarks.worker_loads import Prompts, answer


def main() -> None:
    """Measures everything once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    model = AutoModelForCausalLM.from_pretrained(parsed.model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> None:
        input_ids = torch.tensor(prompts)
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    answer(generate, model.config.vocab_size, parsed.rounds)


if __name__ == "__main__":
    main()
