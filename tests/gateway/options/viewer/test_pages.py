"""The page /ui: its files, their headers, and which web pages may make operators' calls."""

import json
import re
from pathlib import Path

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.telemetry.time_parts import WAITS_FOR
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving
from tests.plain_http import async_http_client

FOLDER = Path(__file__).parents[4] / "services" / "gateway" / "options" / "viewer" / "ui"


async def test_the_page_and_its_files_are_served_with_a_policy(served: Serving) -> None:
    for file in sorted(FOLDER.iterdir()):
        path = "/ui" if file.name == "index.html" else f"/ui/{file.name}"
        answer = await served.http.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = await served.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await served.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert (await served.http.get("/ui/nothing.js")).status_code == 404
    redirect = await served.http.get("/")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "ui")
    redirect = await served.http.get("/ui/")
    assert (redirect.status_code, redirect.headers["location"]) == (308, "../ui")


def test_nothing_is_loaded_from_elsewhere() -> None:
    """The XML namespace of SVG may occur, because browsers load nothing from it."""
    for file in FOLDER.iterdir():
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//\w+\.\w", text), file.name
        assert "innerHTML" not in text
        assert "style=" not in text
    assert sum(len(file.read_bytes()) for file in FOLDER.iterdir()) < 90_000


async def test_the_page_explains_each_wait_reason_as_the_terminal_does(served: Serving) -> None:
    [table] = re.findall("REASONS = (.+);", (await served.http.get("/ui/text.js")).text)
    values = scheduler_pb2.WaitReason.DESCRIPTOR.values
    names = {one.name.removeprefix("WAIT_REASON_").lower() for one in values}
    assert json.loads(table) == WAITS_FOR
    assert names - {"unspecified"} <= WAITS_FOR.keys()


async def test_the_operators_page_may_make_their_calls_and_no_other_page(model: Path) -> None:
    fake = FakeScheduler()
    async with serving(model, fake, admin_address="127.0.0.1:0") as served:
        page = await served.http.get("/ui")
        assert 'data-role="client"' in page.text
        async with async_http_client(base_url=f"http://{served.admin_address}") as admin:
            assert 'data-role="operator"' in (await admin.get("/ui")).text
            own = {"Origin": f"http://{served.admin_address}"}
            assert (await admin.post("/pause?mode=keep", headers=own)).status_code == 200
            for origin in ("https://evil.example", "null", f"https://{served.admin_address}"):
                answer = await admin.post("/resume", headers={"Origin": origin})
                assert answer.status_code == 403, origin
        assert fake.operators_calls == ["PAUSE_MODE_KEEP"]
        assert (await served.http.post("/pause")).status_code == 404
