"""Renders a Helm chart for several sets of values, as a program of its own.

    python render_chart.py CHART < SETS > RESULTS

SETS is a JSON object that maps names to values. RESULTS has for each name the warnings and errors
of `helm lint --strict`, and either the rendered text of each template or the error about the
values. The rendering library is written in Go, so it runs in a process of its own.
"""

import json
import sys
from typing import Any

import helm_python

RELEASE, NAMESPACE = "demo", "llm"
KUBERNETES = "v1.37.0"
_WARNING = 2


def main() -> None:
    path, sets = sys.argv[1], json.load(sys.stdin)
    with helm_python.Chart.load(path) as chart:
        json.dump({name: _result(path, chart, values) for name, values in sets.items()}, sys.stdout)


def _result(path: str, chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, Any]:
    linted = helm_python.lint(
        path, values, strict=True, kube_version=KUBERNETES, namespace=NAMESPACE
    )
    lint = [m["error"] for m in linted["messages"] if m["severity"] >= _WARNING]
    try:
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    except helm_python.HelmError as error:
        return {"lint": lint, "refused": str(error)}
    return {"lint": lint, "texts": texts}


if __name__ == "__main__":
    main()
