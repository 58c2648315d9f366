"""JSON schemas of Kubernetes' own kinds, from the package kubernetes-validate, and of the custom
kinds that the chart uses, from `crd_schemas`.

The schemas in `crd_schemas` were written from the public references of the custom kinds. Each
object of a schema has the fields that the chart uses and their siblings, and allows no others, so a
misspelt field is an error.
"""

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator, Registry

CRD_SCHEMAS = Path(__file__).with_name("crd_schemas")


class KubernetesSchemas:
    """The schemas for one version of Kubernetes, such as 1.37."""

    def __init__(self, version: str) -> None:
        package = files("kubernetes_validate")
        self._directory = package / "kubernetes-json-schema" / f"v{version}.0-local-strict"
        definitions = json.loads((self._directory / "_definitions.json").read_text())
        self._registry = Registry([(definitions["$id"], definitions)])
        self._validator = cache(self._make_validator)

    def errors(self, one: dict[str, Any]) -> list[str]:
        """The schema errors of an object. Each message begins with the path of the wrong value."""
        validator = self._validator(one["apiVersion"], one["kind"].lower())
        return [f"{e.instance_path}: {e.message}" for e in validator.iter_errors(one)]

    def _make_validator(self, api_version: str, kind: str) -> Draft202012Validator:
        group, _, version = api_version.rpartition("/")
        custom = CRD_SCHEMAS / f"{kind}-{group}-{version}.json"
        own = "-".join(filter(None, (kind, group.partition(".")[0], version)))
        file = custom if custom.exists() else self._directory / f"{own}.json"
        return Draft202012Validator(json.loads(file.read_text()), registry=self._registry)
