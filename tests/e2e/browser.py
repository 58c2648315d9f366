"""Headless Chromium, driven by Playwright. Errors of a page fail the test."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
]
DEADLINE_MILLISECONDS = 60_000
WIDE = {"viewport": {"width": 1360, "height": 900}}


def playwright_api() -> Any:
    """Playwright's module. Skips the test if the package or Chromium is not installed."""
    api = pytest.importorskip("playwright.async_api", reason="needs the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    return api


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A browser with its own profile. Skips the test if Chromium is not installed."""
    async with playwright_api().async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, timeout=DEADLINE_MILLISECONDS
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_of(browser: Any, origin: str, **context: Any) -> AsyncIterator[Any]:
    """A page in its own context. At the end it must have written no error to the console, raised no
    exception, and sent requests only to `origin`.
    """
    opened = await browser.new_context(**context)
    opened.set_default_timeout(DEADLINE_MILLISECONDS)
    page = await opened.new_page()
    wrong: list[str] = []

    def log(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"console: {message.text}")

    def ask(request: Any) -> None:
        if not request.url.startswith(f"{origin}/"):
            wrong.append(f"asked elsewhere: {request.url}")

    page.on("console", log)
    page.on("pageerror", lambda error: wrong.append(f"raised: {error}"))
    page.on("request", ask)
    try:
        yield page
        assert wrong == []
    finally:
        await opened.close()
