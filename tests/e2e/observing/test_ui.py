"""Tests the page /ui in headless Chromium, with all four services under load."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.browser import DEADLINE_MILLISECONDS, WIDE, chromium, page_of, playwright_api
from tests.e2e.clients.test_command_line import stepwell
from tests.e2e.conftest import TinyModel
from tests.e2e.stack import Stack
from tests.plain_http import async_http_client
from tests.slowness import busy_slowness

SAYS = "document.querySelector('#waterfall-says').textContent"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "color_scheme": "dark"}
LOADED_WITHIN_MILLISECONDS = 1000
STEP_OF_DETAIL = "document.querySelector('#steps-say').textContent"
NUMBER_OF_TOKENS = "document.querySelectorAll('#numbers b')[4].textContent"


@pytest.fixture(scope="module")
def shown(tiny_model: TinyModel) -> Iterator[Stack]:
    """A stack for tests with a browser. It starts only if a browser is installed."""
    playwright_api()
    stack = Stack(
        tiny_model.directory, *("--max-num-seqs", "4", "--num-blocks", "200", "--admin-port", "0")
    )
    yield stack
    stack.close()


async def until(page: Any, expression: str) -> None:
    """Waits until a JavaScript expression is true. Playwright's own method would evaluate a text in
    the page, which the page's security policy forbids.
    """
    async with asyncio.timeout(DEADLINE_MILLISECONDS / 1000):
        while not await page.evaluate(expression):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def load(stack: Stack) -> AsyncIterator[None]:
    """Keeps six requests open at the services, of which at most four run at once."""

    async def ask(number: int) -> None:
        body = {"prompt": f"{number} " * 20, "max_tokens": 100, "ignore_eos": True}
        async with async_http_client(timeout=120) as http:
            while True:
                answer = await http.post(f"{stack.url}/v1/completions", json=body)
                assert answer.status_code == httpx.codes.OK, answer.text

    tasks = [asyncio.create_task(ask(number)) for number in range(6)]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_page_shows_what_the_replica_does_as_it_does_it(shown: Stack) -> None:
    async with chromium() as browser, page_of(browser, shown.url, **WIDE) as page:
        await page.goto(f"{shown.url}/ui")  # the first page of a browser takes longer
        async with load(shown):
            times = []
            for _ in range(3):
                await page.goto(f"{shown.url}/ui")
                timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
                await until(page, f"{timing} > 0")
                times.append(await page.evaluate(timing))
            assert min(times) < LOADED_WITHIN_MILLISECONDS * busy_slowness()
            await page.wait_for_selector("#state.live")
            await until(page, "document.querySelectorAll('#request-rows tr').length > 4")
            await page.wait_for_selector("#request-rows .waits >> text=max_num_seqs")
            await until(page, f"{STEP_OF_DETAIL}.startsWith('of the budget: prefill')")
            await until(page, f"/[1-9].*\\/s/.test({NUMBER_OF_TOKENS})")
            now = f"{STEP_OF_DETAIL} + {NUMBER_OF_TOKENS}"
            before = await page.evaluate(now)
            await until(page, f"{now} !== {json.dumps(before)}")
            for canvas in ("#timeline", "#blocks"):
                # The chart may be empty for a moment, when all blocks are free between requests.
                await until(page, f"({COLOURS})('{canvas}') > 3")
            for canvas in (
                "#curves figure:nth-child(1) canvas",
                "#curves figure:nth-child(6) canvas",
            ):
                await until(page, f"({COLOURS})('{canvas}') > 3")
            await page.wait_for_selector("#event-rows >> text=ready")
            await page.wait_for_selector("#process-rows >> text=worker 0")
            await page.wait_for_selector("#alerts-say >> text=no alerts fire now")
            await page.hover("#blocks", position={"x": 5, "y": 5})
            detail = "document.querySelector('#block-detail').textContent"
            await until(page, f"{detail}.startsWith('block 1:')")


COLOURS = """(name) => {
  const canvas = document.querySelector(name);
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const drawing = copy.getContext("2d", { willReadFrequently: true });
  drawing.drawImage(canvas, 0, 0);
  const data = drawing.getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
}"""
"""A JavaScript function that returns the number of colours of a canvas. It reads a copy, because
Chromium warns about canvases that are read repeatedly.
"""


CHAT_SETTINGS = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3}


async def test_a_conversation_and_where_its_time_went_on_a_phone(shown: Stack) -> None:
    async with chromium() as browser, page_of(browser, shown.url, **PHONE) as page:
        await page.goto(f"{shown.url}/ui")
        await page.wait_for_selector("#state.live")
        fits = "document.documentElement.scrollWidth <= window.innerWidth"
        assert await page.evaluate(fits)
        await page.click("#chat-settings summary")
        for name, value in {"system": "be brief", **CHAT_SETTINGS}.items():
            await page.fill(f"#chat-{name}", str(value))
        await page.fill("#chat-text", "say something")
        async with page.expect_request("**/v1/chat/completions") as asked:
            await page.click("#chat-send")
        sent = (await asked.value).post_data_json
        assert sent["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "say something"},
        ]
        assert {name: sent.get(name) for name in CHAT_SETTINGS} == CHAT_SETTINGS
        await page.click("#messages .after .link")
        await page.wait_for_selector("#waterfall[open] .span >> text=chat tiny")
        await page.wait_for_selector("#waterfall .track i.stepwell-scheduler")
        await until(page, "document.querySelector('#waterfall-time').textContent.includes(' = ')")
        await page.click("#waterfall-parts .decode")
        await page.wait_for_selector("#waterfall-part >> text=The output was generated")
        # When the last spans arrive, the page draws the waterfall's rows anew.
        await until(page, f"!{SAYS}.includes('further spans will arrive')")
        await page.click("#waterfall .span .head")
        await page.wait_for_selector("#waterfall dt >> text=gen_ai.response.id")
        assert await page.evaluate(fits)
        await page.click("#waterfall-close")
        await page.click("#trace-rows li:first-child button")
        await page.wait_for_selector("#waterfall[open]")
        await page.click("#waterfall-close")
        await page.select_option("#trace-order", "failed")
        await page.wait_for_selector("#traces-say >> text=none of them failed")


async def test_a_request_that_runs_is_a_waterfall_that_grows(shown: Stack) -> None:
    """An unsampled request waits for the end of a pause. The page and the terminal show its
    waterfall, which grows. A trace that was viewed is kept.
    """
    body = {"prompt": "wait for it", "max_tokens": 5}
    headers = {"traceparent": UNSAMPLED, "X-Request-Id": "patient"}
    async with (
        async_http_client(timeout=120) as http,
        chromium() as browser,
        page_of(browser, shown.url, **WIDE) as page,
    ):
        await http.post(f"{shown.admin_url}/pause?mode=keep")
        try:
            sent = http.post(f"{shown.url}/v1/completions", json=body, headers=headers)
            request = asyncio.create_task(sent)
            await page.goto(f"{shown.url}/ui")
            await page.click("#request-rows tr")
            await page.wait_for_selector("#waterfall .span >> text=wait.paused")
            named = "#waterfall-title", "#request-rows td", "#trace-rows .name"
            assert {await page.text_content(place) for place in named} == {"patient"}
            says = await page.text_content("#waterfall-says")
            assert "it runs, and these are its spans so far" in says
            await until(page, f"{SAYS} !== {json.dumps(says)}")
            lines = (await asyncio.to_thread(stepwell, shown, "trace", "patient")).splitlines()
            assert "running: these are its spans so far" in " ".join(" ".join(lines[:2]).split())
            assert any("wait.paused" in line for line in lines)
            listed = await asyncio.to_thread(stepwell, shown, "trace", "--limit", "1")
            assert listed.splitlines()[1].endswith("running")
        finally:
            await http.post(f"{shown.admin_url}/resume")
        assert (await request).status_code == httpx.codes.OK
        await until(page, f"!{SAYS}.includes('it runs')")
        await page.wait_for_selector("#waterfall .span >> text=scheduler.decode")
        kept = (await http.get(f"{shown.url}/traces/patient")).json()
        assert kept["is_complete"]
        kept_for = kept["spans"][0]["attributes"]["stepwell.kept_for"]
        assert kept_for in ("watched", "slowest")


async def test_an_operator_pauses_and_resumes_from_the_page(shown: Stack) -> None:
    async with chromium() as browser, page_of(browser, shown.admin_url, **WIDE) as page:
        await page.goto(f"{shown.admin_url}/ui")
        await page.click("#replicas button >> text=Pause")
        await page.wait_for_selector("#replicas button >> text=Resume")
        await page.wait_for_selector("#state.paused")
        await page.wait_for_selector("#event-rows .warn >> text=paused")
        assert shown.status()["paused"]
        await page.click("#replicas button >> text=Resume")
        await page.wait_for_selector("#replicas button >> text=Pause")
        assert not shown.status()["paused"]
        assert await page.evaluate("document.querySelector('#chat').hidden")


async def test_the_page_says_at_its_head_that_no_replica_is_ready(shown: Stack) -> None:
    async with (
        async_http_client(timeout=120) as http,
        chromium() as browser,
        page_of(browser, shown.url, **WIDE) as page,
    ):
        (replica,) = (await http.get(f"{shown.url}/status")).json()["replicas"]
        which = {"replica": replica["address"]}
        await page.goto(f"{shown.url}/")
        assert page.url == f"{shown.url}/ui"
        await page.wait_for_selector("#state.live")
        await http.post(f"{shown.admin_url}/drain", params=which)
        await page.wait_for_selector("#state.away >> text=no replica is ready")
        await http.post(f"{shown.admin_url}/undrain", params=which)
        await page.wait_for_selector("#state.live")
