"""Decides by the rules of Kubernetes which connections between pods network policies allow."""

from typing import Any

from tests.deploy.rendered import Object, Rendered, selects

STRANGER = {"app": "stranger"}
"""The labels of a pod that is not part of the chart's release."""


class Policies:
    """The network policies of a release. All pods are in the namespace of the release."""

    def __init__(self, release: Rendered) -> None:
        self._policies = release.of("NetworkPolicy")

    def let_through(self, source: dict[str, str], target: dict[str, str], port: int) -> bool:
        """Whether a TCP connection is allowed by the policies of both its source and its target."""
        return self._lets("Egress", source, target, port) and self._lets(
            "Ingress", target, source, port
        )

    def _lets(self, kind: str, pod: dict[str, str], peer: dict[str, str], port: int) -> bool:
        applying = [
            policy["spec"]
            for policy in self._policies
            if kind in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], pod)
        ]
        rules = (rule for spec in applying for rule in spec.get(kind.lower(), ()))
        side = "from" if kind == "Ingress" else "to"
        passing = (_has_port(rule, port) and _has_peer(rule.get(side), peer) for rule in rules)
        return not applying or any(passing)


def _has_port(rule: Object, port: int) -> bool:
    ports: list[Any] = rule.get("ports", [])
    return not ports or any(one["port"] == port and one["protocol"] == "TCP" for one in ports)


def _has_peer(peers: list[Object] | None, labels: dict[str, str]) -> bool:
    """Whether a rule that names these peers allows a pod with these labels in its own namespace."""
    if peers is None:
        return True
    own = (peer["podSelector"] for peer in peers if "podSelector" in peer)
    return any(selects(selector, labels) for selector in own)
