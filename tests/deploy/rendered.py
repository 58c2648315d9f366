"""A rendered chart as Kubernetes reads it: objects, pods, containers and their variables."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Object = dict[str, Any]

SERVICES = ("gateway", "scheduler", "kvpool", "worker")

_VARIABLE = re.compile(r"\$\((\w+)\)")
_SECRETS = {"REDIS_URL": "redis://user:secret@redis.example.org:6379", "KEYS": "sk-a,sk-b"}
_LOCAL_RANKS = ["python3", "-m", "services.worker.local_ranks"]
_LEADER_WORKER_SET = {"LWS_LEADER_ADDRESS": "leader.llm", "LWS_GROUP_SIZE": "2"}


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod, or an init container that runs as long as the pod."""

    pod: "Pod"
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.pod.owner['metadata']['name']}/{self.spec['name']}"

    @property
    def service(self) -> str | None:
        """The Stepwell service that the container runs, or None for other programs."""
        image = re.fullmatch(r".*stepwell/([a-z]+)(-cuda)?[:@].*", self.spec["image"])
        service = "" if image is None else image[1]
        runs = self.spec.get("command", _LOCAL_RANKS) == _LOCAL_RANKS
        return service if service in SERVICES and runs else None

    def environment(self) -> dict[str, str]:
        """The environment variables. `$(NAME)` is replaced by the value of an earlier variable."""
        values = self.pod.given_variables()
        for variable in self.spec.get("env", ()):
            values[variable["name"]] = self._value(variable, values)
        return values

    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", ())}

    def mounts(self) -> dict[str, Object]:
        """Maps each mount path to its volume."""
        volumes = {volume["name"]: volume for volume in self.pod.spec.get("volumes", ())}
        return {mount["mountPath"]: volumes[mount["name"]] for mount in self.spec["volumeMounts"]}

    def _value(self, variable: Object, before: Mapping[str, str]) -> str:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            return self.pod.field(source["fieldRef"]["fieldPath"])
        if "secretKeyRef" in source:
            matches = (text for end, text in _SECRETS.items() if variable["name"].endswith(end))
            return next(matches, "secret")
        return _VARIABLE.sub(lambda m: before.get(m[1], m[0]), variable["value"])


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, or the pod template of the object `owner`."""

    owner: Object
    labels: Mapping[str, str]
    spec: Object

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    def containers(self) -> list[Container]:
        specs = [*self.spec.get("initContainers", ()), *self.spec["containers"]]
        return [Container(self, spec) for spec in specs]

    def field(self, path: str) -> str:
        """A field of the owner's first pod."""
        is_ipv6 = any("[::]" in str(c.spec.get("env")) for c in self.containers())
        address = "fd00::7" if is_ipv6 else "10.0.0.7"
        name = f"{self.owner['metadata']['name']}-0"
        return {"metadata.name": name, "status.podIP": address}[path]

    def given_variables(self) -> dict[str, str]:
        """Environment variables that Kubernetes adds to the declared ones."""
        if self.owner["kind"] == "LeaderWorkerSet":
            rank = "1" if self.component == "rank" else "0"
            return {**_LEADER_WORKER_SET, "LWS_WORKER_INDEX": rank}
        first = self.owner["spec"].get("ordinals", {}).get("start", 0)
        return {"HOSTNAME": f"{self.owner['metadata']['name']}-{first}"}


class Rendered:
    """A rendered chart: its objects, or the error message for refused values."""

    def __init__(self, name: str, result: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values
        self.lint: list[str] = result["lint"]
        self.refused: str | None = result.get("refused")
        self.texts: dict[str, str] = result.get("texts", {})
        self.notes = next((t for name, t in self.texts.items() if name.endswith("NOTES.txt")), "")
        self.objects: list[Object] = [
            document
            for name, text in self.texts.items()
            if name.endswith(".yaml")
            for document in yaml.load_all(text, yaml.CSafeLoader)
            if document is not None
        ]

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def kinds(self) -> set[str]:
        return {one["kind"] for one in self.objects}

    def pods(self) -> list[Pod]:
        return [pod for one in self.objects for pod in _pods(one)]

    @property
    def services(self) -> set[str]:
        """The services that the release has. The gateways may belong to another release."""
        return set(SERVICES) - (
            {"gateway"} if self.values.get("gateway", {}).get("ofRelease") else set()
        )

    def pod(self, component: str) -> Pod:
        return next(pod for pod in self.pods() if pod.component == component)

    def containers(self) -> list[Container]:
        return [container for pod in self.pods() for container in pod.containers()]


def _pods(one: Object) -> Iterator[Pod]:
    if one["kind"] == "Pod":
        yield Pod(one, one["metadata"]["labels"], one["spec"])
    if one["kind"] in ("Deployment", "StatefulSet"):
        yield _templated(one, one["spec"]["template"])
    if one["kind"] == "LeaderWorkerSet":
        templates = one["spec"]["leaderWorkerTemplate"]
        yield _templated(one, templates["leaderTemplate"])
        yield _templated(one, templates["workerTemplate"])


def _templated(owner: Object, template: Object) -> Pod:
    return Pod(owner, template["metadata"]["labels"], template["spec"])


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches labels. An empty one matches everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for wanted in selector.get("matchExpressions", ()):
        assert wanted["operator"] == "In", wanted
        if labels.get(wanted["key"]) not in wanted["values"]:
            return False
    return True
