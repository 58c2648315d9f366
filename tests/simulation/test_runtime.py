"""The simulator's runtime: virtual time, a guard against real I/O, and a network in memory."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PREAMBLE = """
import asyncio, os, random, socket, threading, time, uuid
from services.simulation.runtime.machine import PastThePorts, install, run_on
install()
import grpc
from services.simulation.runtime.loop import Livelock, NothingHappens, VirtualLoop
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process
from services.simulation.runtime.streams import MemoryStreams

def run(main, seed=1):
    network = Network(VirtualLoop(seed))
    MemoryStreams(network)
    return run_on(network, seed, lambda: main(network))

def raises(error, main):
    try:
        run(main)
    except error:
        return True
    return False
"""


def in_virtual_time(code: str) -> None:
    """Runs `code` in a process of its own, because the clocks must be replaced before imports."""
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": ".:gen", "PATH": "/usr/bin"},
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_a_sleep_takes_no_real_time_and_every_clock_shows_it() -> None:
    in_virtual_time("""
real = time.monotonic()
async def main(network):
    begun = time.monotonic(), time.time(), time.perf_counter_ns()
    await asyncio.sleep(3600)
    assert 3600 <= time.monotonic() - begun[0] < 3600.01
    assert 3600 <= time.time() - begun[1] < 3600.01
    assert 3600e9 <= time.perf_counter_ns() - begun[2] < 3600.01e9
run(main)
assert time.monotonic() - real < 60
""")


def test_chance_is_drawn_from_the_seed() -> None:
    in_virtual_time("""
import secrets
async def main(network):
    return random.random(), uuid.uuid4(), os.urandom(4), secrets.token_hex(4)
assert run(main) == run(main) != run(main, seed=2)
""")


def test_a_single_thread_runs_functions_in_order_and_no_cancelled_ones() -> None:
    in_virtual_time("""
from concurrent.futures import ThreadPoolExecutor
async def main(network):
    loop = asyncio.get_running_loop()
    for num_threads in (1, 2):
        thread, ran = ThreadPoolExecutor(num_threads), []
        calls = [loop.run_in_executor(thread, ran.append, number) for number in range(50)]
        calls[7].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        expected = [number for number in range(50) if number != 7]
        assert sorted(ran) == expected and (ran == expected) == (num_threads == 1), ran
run(main)
""")


def test_what_cannot_be_virtual_is_refused() -> None:
    in_virtual_time("""
async def thread(network): threading.Thread(target=print).start()
async def file(network): open("/tmp/written-in-virtual-time", "w")
async def a_socket(network): socket.socket()
async def blocking(network): time.sleep(1)
for main in (thread, file, a_socket, blocking):
    assert raises(PastThePorts, main), main
assert not os.path.exists("/tmp/written-in-virtual-time")
""")


def test_a_wait_for_nothing_and_an_endless_loop_are_reported() -> None:
    in_virtual_time("""
async def deadlock(network): await asyncio.get_running_loop().create_future()
async def livelock(network):
    while True:
        await asyncio.sleep(0)
assert raises(NothingHappens, deadlock)
assert raises(Livelock, livelock)
""")


GRPC = """
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services.common.rpc.channel import open_channel
from services.common.rpc.server import GrpcServer

async def serve(network, name="server"):
    process = Process(network.loop, name)
    async def start():
        server = GrpcServer()
        await server.start(f"{name}:1")
        return server
    return process, await process.spawn(start())

def in_client(network, coroutine):
    return Process(network.loop, "client").spawn(coroutine)

async def check(timeout=None, service=""):
    async with open_channel("server:1") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, timeout=timeout)).status

async def code_of(awaitable):
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code()
"""


def test_a_call_is_answered_and_an_error_has_its_status() -> None:
    in_virtual_time(
        GRPC
        + """
async def main(network):
    await serve(network)
    assert await in_client(network, check()) == health_pb2.HealthCheckResponse.SERVING
    code = await code_of(in_client(network, check(service="unknown")))
    assert code is grpc.StatusCode.NOT_FOUND
run(main)
"""
    )


def test_a_cut_network_and_a_stopped_server_delay_a_call_to_its_deadline() -> None:
    in_virtual_time(
        GRPC
        + """
async def main(network):
    process, _ = await serve(network)
    client = Process(network.loop, "client")
    process.stop()
    assert await code_of(client.spawn(check(2))) is grpc.StatusCode.DEADLINE_EXCEEDED
    network.loop.resume(process)
    assert await client.spawn(check(2)) == health_pb2.HealthCheckResponse.SERVING
    network.cut(process, client)
    assert await code_of(client.spawn(check(2))) is grpc.StatusCode.DEADLINE_EXCEEDED
    network.mend(process, client)
    assert await client.spawn(check(2)) == health_pb2.HealthCheckResponse.SERVING
run(main)
"""
    )


def test_a_connection_ends_after_one_long_interruption_but_not_after_many_short_ones() -> None:
    in_virtual_time(
        GRPC
        + """
async def main(network):
    server, _ = await serve(network)
    client = Process(network.loop, "client")

    async def watch():
        async with open_channel("server:1") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                pass

    watching = client.spawn(code_of(watch()))
    await asyncio.sleep(1)
    for _ in range(100):
        server.stop()
        network.stopped(server)
        network.cut(client, server)
        await asyncio.sleep(0.9)
        network.mend(client, server)
        network.loop.resume(server)
        await asyncio.sleep(0.1)
    assert not watching.done()
    server.stop()
    network.stopped(server)
    assert await watching is grpc.StatusCode.UNAVAILABLE
run(main)
"""
    )


def test_messages_on_their_way_at_the_end_of_a_cut_arrive_after_older_messages() -> None:
    in_virtual_time("""
from services.simulation.runtime.network import Pipe
async def main(network):
    one, other = Process(network.loop, "one"), Process(network.loop, "other")
    pipe, seen = Pipe(network, one, other), []
    network.cut(one, other)
    network.spike_chance = 0.0
    pipe.send(seen.append, "waits for the end of the cut")
    await asyncio.sleep(0.001)
    network.spike_chance = 1.0
    for number in range(9):
        pipe.send(seen.append, number)
    network.mend(one, other)
    await asyncio.sleep(0.1)
    assert seen == ["waits for the end of the cut", *range(9)], seen
run(main)
""")


def test_no_connection_is_left_of_a_client_that_dies_before_its_connection_is_accepted() -> None:
    in_virtual_time(
        GRPC
        + """
async def main(network):
    process, _ = await serve(network)
    client = Process(network.loop, "client")
    network.cut(client, process)
    client.spawn(check())
    await asyncio.sleep(0.5)
    client.kill()
    network.mend(client, process)
    await asyncio.sleep(0.5)
    assert not network.connections
run(main)
"""
    )


def test_a_killed_server_breaks_its_calls_and_runs_no_more_code() -> None:
    in_virtual_time(
        GRPC
        + """
async def main(network):
    process, server = await serve(network)
    async def watch():
        async with open_channel("server:1") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            async for _ in watch(health_pb2.HealthCheckRequest()):
                pass
    ends = []
    async def task():
        try:
            await asyncio.sleep(1)
        finally:
            ends.append("ended")
    process.spawn(task())
    watching = in_client(network, watch())
    await asyncio.sleep(0.5)
    process.kill()
    assert await code_of(watching) is grpc.StatusCode.UNAVAILABLE
    await asyncio.sleep(5)
    assert not ends
    assert await code_of(in_client(network, check())) is grpc.StatusCode.UNAVAILABLE
run(main)
"""
    )


def test_a_connection_is_refused_if_the_server_dies_before_it_is_accepted() -> None:
    in_virtual_time("""
async def main(network):
    process, client = Process(network.loop, "server"), Process(network.loop, "client")
    async def serve():
        listener = network.loop.servers.listener(("server", 1))
        await asyncio.start_server(lambda reader, writer: None, sock=listener)
    await process.spawn(serve())
    connecting = client.spawn(asyncio.open_connection("server", 1))
    for _ in range(3):
        await asyncio.sleep(0)
    process.kill()
    try:
        await connecting
    except ConnectionRefusedError:
        return
    raise AssertionError
run(main)
""")


def test_a_channel_connects_at_once_if_the_stopped_server_it_waits_for_is_replaced() -> None:
    in_virtual_time(
        GRPC
        + """
async def main(network):
    process, _ = await serve(network)
    process.stop()
    async def ask():
        async with open_channel("server:1") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    asking = in_client(network, ask())
    await asyncio.sleep(0.5)
    process.kill()
    await serve(network)
    async with asyncio.timeout(1):
        await asking
run(main)
"""
    )


def test_a_client_can_connect_to_a_stopped_server_and_is_served_later() -> None:
    in_virtual_time("""
async def main(network):
    async def echo(reader, writer):
        writer.write(await reader.readline())

    async def serve():
        sock = network.loop.servers.listener(("server", 80))
        return await asyncio.start_server(echo, sock=sock)

    async def ask():
        async with asyncio.timeout(1):
            reader, writer = await asyncio.open_connection("server", 80)
        writer.write(b"hello\\n")
        network.loop.call_later(5, network.loop.resume, server)
        return await reader.readline()

    server = Process(network.loop, "server")
    await server.spawn(serve())
    server.stop()
    assert await Process(network.loop, "client").spawn(ask()) == b"hello\\n"
run(main)
""")


def test_callbacks_of_a_continued_process_run_in_order_in_one_or_several_iterations() -> None:
    in_virtual_time("""
async def main(network):
    process, seen, num_iterations = Process(network.loop, "process"), [], 0

    def note(number):
        seen.append((number, num_iterations))

    process.stop()
    for number in range(5):
        network.loop.call_soon(note, number, context=process.context)
    await asyncio.sleep(1)
    network.loop.resume(process)
    for num_iterations in range(40):
        await asyncio.sleep(0)
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    return len({iteration for _, iteration in seen})
numbers = [run(main, seed) for seed in range(20)]
assert min(numbers) == 1
assert max(numbers) > 2
""")
