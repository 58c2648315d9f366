"""Binds a worker's threads to processors if the machine has several NUMA nodes.

A node's own cores read its memory faster than other cores, and a barrier between threads is faster
within a node. Linux allocates memory on the node of the thread that first writes to it. Therefore a
worker's compute thread is bound to the cores of one node before it loads the model, and the OpenMP
threads that it starts inherit the binding. Weights, KV cache and activations are then on this node
if its memory suffices, and the default size of the KV cache follows from one node's share of the
memory. Other threads of the process, such as the event loop's thread, are not bound.

By default nothing is bound in two cases. On a machine with a single node all memory is equally
near, and the operating system can move threads away from processors that other processes use. Under
a CPU quota, containers that cannot see each other would bind their threads to the same cores.

The setting has the same values as vLLM's VLLM_CPU_OMP_THREADS_BIND.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.common.process.processors import Processor, Processors, cpu_list
from services.common.process.settings import SettingError
from services.worker.backends.choices import BIND_AUTO, BIND_NONE
from services.worker.platforms.threads import ENOUGH_TO_SPARE, ThreadChoice, choose_threads

FLAG = "--cpu-omp-threads-bind"


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """The number of a worker, from 0 on, among the `count` workers on this machine."""

    index: int = 0
    count: int = 1


def place_threads(
    processors: Processors,
    worker: LocalWorker = LocalWorker(),
    asked: int | None = None,
    bind: str = BIND_AUTO,
) -> ThreadChoice:
    """Chooses a worker's threads, and the processors to which they are bound. Raises SettingError
    if `bind` has lists of processors but none for this worker, or one that this process may not
    use.
    """
    if bind == BIND_NONE or (bind == BIND_AUTO and not _suits(processors)):
        return choose_threads(processors, worker.count, asked)
    own, reason = (
        _own_cores(processors, worker) if bind == BIND_AUTO else _listed(processors, worker, bind)
    )
    order = cores_first(own)
    if asked is None and bind == BIND_AUTO:
        order = order[: len({processor.core for processor in own})]
    numbers = tuple(sorted(processor.number for processor in order[:asked]))
    chosen = len(numbers) if asked is None else asked
    return ThreadChoice(chosen, f"{reason}, bound to {list_text(numbers)}", numbers)


def memory_sharers(processors: Processors, worker: LocalWorker, bind: str = BIND_AUTO) -> int:
    """The number of equal parts into which the machine's memory is divided. Each worker may use one
    part. If workers are bound to nodes, there are at least as many parts as nodes, so that a worker
    uses at most its node's memory.
    """
    if bind != BIND_AUTO or not _suits(processors):
        return worker.count
    return max(worker.count, len({processor.node for processor in processors.allowed}))


def bind_and_set(choice: ThreadChoice) -> None:
    """Sets torch's number of threads. Binds the calling thread and the threads it starts later."""
    if choice.processors:
        os.sched_setaffinity(0, choice.processors)
    torch.set_num_threads(choice.num_threads)


def cores_first(processors: Sequence[Processor]) -> list[Processor]:
    """Returns one processor of each core, then the second processors of all cores, and so on."""
    num_before: dict[int, int] = {}
    ranked = []
    for processor in sorted(processors, key=lambda each: each.number):
        rank = num_before[processor.core] = num_before.get(processor.core, -1) + 1
        ranked.append((rank, processor.number, processor))
    return [processor for _, _, processor in sorted(ranked, key=lambda each: each[:2])]


def list_text(numbers: Sequence[int]) -> str:
    """Formats ascending numbers as Linux does, for example 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _suits(processors: Processors) -> bool:
    has_nodes = len({processor.node for processor in processors.allowed}) > 1
    return has_nodes and processors.within_quota(processors.num_cores) == processors.num_cores


def _own_cores(processors: Processors, worker: LocalWorker) -> tuple[list[Processor], str]:
    """Returns the processors of the cores that a worker gets, all on one node, and the reason as a
    text.

    Workers are distributed over the nodes in order, so that the ranks of a replica are on as few
    nodes as possible. The workers on one node divide its cores.
    """
    nodes = sorted({processor.node for processor in processors.allowed})
    node_of = [nodes[index * len(nodes) // worker.count] for index in range(worker.count)]
    node = node_of[worker.index]
    mates = [index for index in range(worker.count) if node_of[index] == node]
    on_node = [processor for processor in processors.allowed if processor.node == node]
    cores = sorted({processor.core for processor in on_node})
    reasons = [f"{len(cores)} cores of node {node}, of {len(nodes)} nodes"]
    has_idle = len(on_node) > len(cores) or worker.count < len(nodes)
    if len(cores) >= ENOUGH_TO_SPARE and not has_idle:
        cores.pop()
        reasons.append("one left to other services")
    if len(mates) > 1:
        reasons.append(f"shared by {len(mates)} workers")
    place, count = mates.index(worker.index), len(mates)
    begin, end = len(cores) * place // count, len(cores) * (place + 1) // count
    own = cores[begin:end] or [cores[place % len(cores)]]
    return [processor for processor in on_node if processor.core in own], ", ".join(reasons)


def _listed(processors: Processors, worker: LocalWorker, bind: str) -> tuple[list[Processor], str]:
    lists = bind.split("|")
    if worker.index >= len(lists):
        raise SettingError(
            f"{FLAG} has only {len(lists)} lists, but worker {worker.index} of the {worker.count} "
            "local workers needs its own"
        )
    wanted = cpu_list(lists[worker.index])
    usable = {processor.number: processor for processor in processors.allowed}
    if wrong := sorted(wanted - usable.keys()):
        raise SettingError(f"{FLAG}: this process may not use processors {list_text(wrong)}")
    return [usable[number] for number in sorted(wanted)], "as set by --cpu-omp-threads-bind"
