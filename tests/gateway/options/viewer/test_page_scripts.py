"""The scripts of the page /ui, run in headless Chromium with given values."""

import json
import re
from functools import partial
from typing import Any

import pytest

from tests.e2e.browser import WIDE, chromium, page_of
from tests.gateway.serving import Serving

HOSTILE = [
    "<script>alert(1)</script> <img src=x onerror=alert(1)>",
    "[go](javascript:alert(1)) [go](data:text/html,x) [go](//evil.example) [go](/ui)",
    "**<b onclick=alert(1)>** `<i>` ~~<s>~~ *<u>*",
    "```html\n<iframe src=/ui></iframe>\n",
    "> " * 500 + "deep",
    "- a\n" * 500 + "|a|\n|-|\n|<td>|",
    "[" * 5000 + "*" * 5000 + "`" * 999,
    "# <h1>\n1. <li>\n  - [x](https://user:pass@good.example/?a=<b>)\n***",
]
RENDERED = """async (texts) => {
  const { markdown } = await import("/ui/markdown.js");
  const box = document.createElement("div");
  box.append(...texts.flatMap((text) => markdown(text)));
  const made = [...box.querySelectorAll("*")];
  return {
    names: [...new Set(made.map((one) => one.localName))],
    attributes: [...new Set(made.flatMap((one) => one.getAttributeNames()))],
    links: made.filter((one) => one.href).map((one) => one.protocol),
    text: box.textContent,
  };
}"""


DRAWN = """async () => {
  const { colour, idOf } = await import("/ui/text.js");
  const { Timeline } = await import("/ui/timeline.js");
  const { History } = await import("/ui/history.js");
  const row = (canvas, y) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const drawing = copy.getContext("2d");
    drawing.drawImage(canvas, 0, 0);
    const { data } = drawing.getImageData(0, y, canvas.width, 1);
    return new Uint32Array(data.buffer);
  };
  const share = (pixels, one) => pixels.filter((each) => each === one).length / pixels.length;
  const timeline = new Timeline();
  const step = (number, began, long) => ({
    step: number, began_unix_seconds: began, seconds: long, num_requests: 1, num_preemptions: 0,
    num_prefill_tokens: 0, num_decode_tokens: 8, wait_reason: null, keys: [number], num_tokens: [8],
  });
  timeline.add([step(1, 100, 1), step(2, 102, 2)], 8, String);
  timeline.draw();
  const steps = row(timeline.canvas, Math.floor(timeline.canvas.height / 2));
  timeline.add([step(1, 110, 1)], 8, String);
  const history = new History();
  const began = [...Array(11).keys()].map((bin) => 10 * bin);
  const values = Object.fromEntries(
    ["first_token_seconds", "per_token_seconds", "request_seconds", "num_ended", "num_refused",
     "num_failed", "num_tokens", "num_running", "num_waiting", "held_share"].map(
      (name) => [name, began.map(() => name.endsWith("seconds") ? null : 0)]),
  );
  const marks = (...events) => {
    history.history = { unix_seconds: 110, bin_seconds: 10, began_unix_seconds: began, ...values,
                        events: events.map(([kind, unix_seconds]) => ({ kind, unix_seconds })) };
    history.draw();
    const pixels = row(history.charts[0].canvas, 0);
    return [...pixels.keys()].filter((x) => pixels[x]).map((x) => x / pixels.length);
  };
  const curves = (values) => {
    const bins = Object.fromEntries(
      Object.entries(values).map(([name, value]) => [name, began.map(() => value)]));
    history.history = { unix_seconds: 110, bin_seconds: 10, began_unix_seconds: began, ...bins,
                        events: [] };
    history.draw();
    return history.charts.map(({ canvas, says }) => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height);
      const drawing = copy.getContext("2d");
      drawing.drawImage(canvas, 0, 0);
      const { data } = drawing.getImageData(Math.floor(canvas.width / 2), 0, 1, canvas.height);
      const rows = [...Array(canvas.height).keys()].filter((y) => data[4 * y + 3] > 128);
      const lines = rows.filter((y, index) => y !== rows[index - 1] + 1);
      const axis = lines.pop();
      return [says.textContent, lines.map((y) => (axis - y) / (axis - 13))];
    });
  };
  const { showReplicas, showTabs } = await import("/ui/replicas.js");
  const named = ["left", "right"].map((name) => (
    { name, address: `${name}:9001`, ready: false, reason: "it starts", cached_tokens: null }));
  const texts = (query) => [...document.querySelectorAll(query)].map((one) => one.textContent);
  showTabs(named, "left:9001", () => {});
  showReplicas(named, () => {});
  return {
    names: [texts("#replica-tabs button"), texts("#replica-cards h3"), texts("#replica-cards dd")],
    curves: curves(CURVES),
    colours: new Set([...Array(24).keys()].map(colour)).size,
    ids: ["chatcmpl-a-1", "cmpl-a-1", "msg-a-1", "resp-a-1", "a-1"].map(idOf),
    restarted: timeline.steps.map((one) => one.began_unix_seconds),
    steps: [0.1, 0.9].map((part) => share(steps, steps[Math.floor(part * steps.length)])),
    marks: [marks(["lost", 55]), marks(["refused", 55])],
  };
}"""
"""A script that draws two steps of 1 s and 2 s with a pause of 1 s between them, and adds a step of
a new scheduler process. Draws curves over 110 s with an event in the middle, the constant curves of
`CURVES`, and two replicas.
"""
CURVES = {
    "first_token_seconds": [0.5, 2],
    "per_token_seconds": [0.02, 0.05],
    "request_seconds": [3, 4],
    "num_ended": 20,
    "num_refused": 5,
    "num_tokens": 4000,
    "num_running": 3,
    "num_waiting": 2,
    "held_share": 0.25,
}
"""Values that are the same in each bin of ten seconds."""
SHOWN_CURVES = [
    ("median 500 msp99 2.00 s", [1, 1 / 4]),
    ("median 20.0 msp99 50.0 ms", [1, 2 / 5]),
    ("median 3.00 sp99 4.00 s", [4 / 5, 3 / 5]),
    ("answered 2.0/srefused 0.5/s", [1, 1 / 4]),
    ("tokens 400/s", [4 / 5]),
    ("running 3waiting 2", [3 / 5, 2 / 5]),
    ("held 25.0 %", [1 / 2]),
]
"""Each chart's text, and each curve's distance from the top as a fraction of the height."""


def trace_of(name: str, waited_for: str | None) -> dict[str, Any]:
    """The trace of a request that waited for blocks of the request `waited_for`."""
    blocks = {"name": "blocks", "seconds": 1.0, "explanation": "", "step": 7}
    return {
        "trace_id": name,
        "request_id": f"cmpl-{name}",
        "is_complete": True,
        "is_running": False,
        "time": {"line": name, "seconds": 1.0, "parts": [blocks | {"waited_for": waited_for}]},
        "spans": [],
    }


def process(service: str, version: str, protocol: str, days_left: float) -> dict[str, Any]:
    certificate = {"certificate": "internal", "seconds_left": days_left * 86400}
    release = {"version": version, "protocol": protocol, "started_unix_seconds": 940.0}
    place = {"service": service, "instance": "host", "rank": None}
    place |= {"replica": "", "model_name": None}
    return place | release | {"certificates": [certificate]}


def alert(name: str, began: float, ended: float | None) -> dict[str, Any]:
    texts = {"summary": f"{name} is true", "description": "It is.", "runbook_url": "docs"}
    times = {"began_unix_seconds": began, "ended_unix_seconds": ended}
    return {"name": f"Stepwell{name}", "severity": "critical", **texts, **times}


OVERVIEW = {
    "unix_seconds": 1000.0,
    "watched_since_unix_seconds": 900.0,
    "alerts": [alert("One", 990.0, None), alert("Two", 910.0, 950.0)],
    "num_rules": 3,
    "rules_left_out": ["Three"],
    "num_series_left_out": 0,
    "tenants": [
        {
            "tenant": "<b>acme</b>",
            **{"num_running": 2, "num_waiting": 5, "num_tokens_of_minute": 12345},
            **{"share_of_minute": 0.75, "num_refused_of_hour": 3},
        }
    ],
    "refusals": [{"reason": "queue_full", "num_of_minute": 1, "num_of_hour": 3}],
    "processes": [
        process("gateway", "0.2.0", "3", 57),
        process("worker", "0.1.0", "2", 0.5),
    ],
    "redis": {
        "address": "redis://host",
        "seconds": None,
        "error": "no answer in time",
        "uses": [{"name": "API keys", "works": None, "without": "old keys work"}],
    },
}
SHOWN_OVERVIEW = {
    "#alert-rows li:nth-child(1)": "criticalOnesince .*One is trueIt is.",
    "#alert-rows li:nth-child(2)": "endedTwo.* – .*Two is true",
    "#alerts-say": "1 alert fires now; .* evaluates 3 rules since .*; not evaluated here: Three",
    "#tenant-rows": "<b>acme</b>2512.3k75.0 %3",
    "#refusal-rows": "queue full13",
    "#process-rows tr:nth-child(1)": "host gateway0.2.031 mininternal 57 d ",
    "#process-rows tr:nth-child(2) .waits": "0.1.0",
    "#process-rows tr:nth-child(2) .failed": "2",
    "#process-rows tr:nth-child(2) span .failed": "internal 12 h 0 min",
    "#redis-says.failed": "no answer in time",
    "#redis-rows": "API keyswithout Redis: old keys work",
}
"""Maps selectors to the texts, as regular expressions, of the elements that show OVERVIEW."""


CHAT = [
    ('{"error": {"message": "it is full"}}', "it is full"),
    ('{"choices": [{"delta": {"reasoning": "let me see"}}]}', "let me see"),
    ('{"choices": [{"delta": {"content": "all is well"}}]}', "all is well"),
]
"""For each turn of a chat, the JSON of an event and the text that the page shows."""


async def fulfil(answer: dict[str, Any], route: Any) -> None:
    await route.fulfill(json=answer)


async def stream(event: str, route: Any) -> None:
    """Answers with an event, before which the server keeps the connection open by a comment."""
    body = f": keep-alive\n\ndata: {event}\n\ndata: [DONE]\n\n"
    await route.fulfill(content_type="text/event-stream", body=body)


async def test_the_scripts_of_the_page_draw_what_they_are_given(served: Serving) -> None:
    async with chromium() as browser, page_of(browser, served.base_url, **WIDE) as page:
        await page.goto(f"{served.base_url}/ui")
        drawn = await page.evaluate(DRAWN.replace("CURVES", json.dumps(CURVES)))
        assert drawn["colours"] == 24
        assert set(drawn["ids"]) == {"a-1"}
        assert drawn["steps"] == pytest.approx([1 / 4, 2 / 4], abs=0.02)
        assert drawn["restarted"] == [110]
        assert [text for text, _ in drawn["curves"]] == [text for text, _ in SHOWN_CURVES]
        for (text, heights), (_, expected) in zip(drawn["curves"], SHOWN_CURVES, strict=True):
            assert heights == pytest.approx(expected, abs=0.05), text
        tabs, cards, rows = drawn["names"]
        assert tabs == cards == ["left", "right"]
        assert rows == ["it starts", "left:9001", "it starts", "right:9001"]
        lost, refused = drawn["marks"]
        assert lost[0] == pytest.approx(0.5, abs=0.02)
        assert len(lost) < 8
        assert refused == []
        for name, waited_for in (("waiter", "cmpl-holder"), ("cmpl-holder", None)):
            trace = trace_of(name.removeprefix("cmpl-"), waited_for)
            await page.route(f"**/traces/{name}", partial(fulfil, trace))
        opened = "import('/ui/traces.js').then(({ Traces }) => new Traces(alert).open('waiter'))"
        await page.evaluate(opened)
        await page.click("#waterfall-parts .blocks")
        await page.wait_for_selector("#waterfall-part >> text=began with step 7")
        await page.click("#waterfall-part .link >> text=holder")
        await page.wait_for_selector("#waterfall-title >> text=holder")
        await page.click("#waterfall-close")
        await page.route("**/activity/overview", partial(fulfil, OVERVIEW))
        await page.evaluate("import('/ui/overview.js').then((made) => made.showOverview())")
        for selector, text in SHOWN_OVERVIEW.items():
            assert re.fullmatch(text, await page.text_content(selector)), selector
        made = await page.evaluate(RENDERED, HOSTILE)
        assert {"p", "strong", "em", "s", "code", "pre", "ul", "ol", "table", "hr"} <= {
            *made["names"]
        }
        assert not {"script", "img", "iframe", "b", "i", "u"} & {*made["names"]}
        assert {*made["attributes"]} <= {"title", "href", "target", "rel", "start"}
        assert {*made["links"]} == {"https:"}
        assert "<script>alert(1)</script>" in made["text"]
        for number, (event, shown) in enumerate(CHAT):
            await page.route("**/v1/chat/completions", partial(stream, event))
            await page.fill("#chat-text", f"question {number}")
            async with page.expect_request("**/v1/chat/completions") as asked:
                await page.click("#chat-send")
            await page.wait_for_selector(f"#messages .assistant >> text={shown}")
        sent = (await asked.value).post_data_json["messages"]
        assert [(turn["role"], turn["content"]) for turn in sent] == [
            ("user", "question 1"),
            ("assistant", ""),
            ("user", "question 2"),
        ]
