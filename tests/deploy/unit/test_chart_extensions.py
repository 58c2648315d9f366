"""Values that extend the Helm chart's objects and pods, and its Ingresses and HTTPRoutes."""

from tests.deploy.rendered import Object, Rendered

CONTAINERS = {
    "gateway": (["wait-for-secrets"], ["gateway", "oauth2-proxy"]),
    "replica": (["gpu-metrics", "kvpool", "worker"], ["scheduler", "logs"]),
    "rank": (["gpu-metrics"], ["worker", "logs"]),
}
"""The init containers and the containers of pods in the example `extended`, in their order."""


def test_containers_and_fields_are_added_to_pods(releases: dict[str, Rendered]) -> None:
    release = releases["extended"]
    for component, names in CONTAINERS.items():
        spec = release.pod(component).spec
        kinds = ("initContainers", "containers")
        assert tuple([one["name"] for one in spec[kind]] for kind in kinds) == names
        assert (spec["schedulerName"], spec["dnsPolicy"]) == ("platform", "None")
        assert spec["hostAliases"][0]["hostnames"] == ["proxy.example.org"]
        assert spec["dnsConfig"]["nameservers"] == ["10.0.0.10"]


def test_containers_of_services_get_variables_and_mounts(releases: dict[str, Rendered]) -> None:
    release = releases["extended"]
    containers = [c for c in release.containers() if c.service is not None]
    assert len(containers) == 5
    for container in containers:
        (source,) = container.spec["envFrom"]
        assert source["configMapRef"]["name"] in _names(release, "ConfigMap")
        assert container.mounts()["/etc/ssl/platform"]["configMap"] == {"name": "platform-ca"}


def test_images_come_from_the_registry_of_all_charts(releases: dict[str, Rendered]) -> None:
    for pod in releases["extended"].pods():
        for container in pod.containers():
            assert container.spec["image"].startswith("mirror.example.org/"), container.name
        assert pod.spec["imagePullSecrets"] == [{"name": "mirror"}, {"name": "registry"}]


def test_extra_objects_are_templates(releases: dict[str, Rendered]) -> None:
    assert _names(releases["extended"], "ConfigMap") == {
        *("demo-stepwell-proxy", "demo-stepwell-oauth2-proxy"),
    }
    (policy,) = releases["tls-cert-manager"].of("BackendTLSPolicy")
    (target,) = policy["spec"]["targetRefs"]
    assert target["name"] in _names(releases["tls-cert-manager"], "Service")


def test_common_labels_are_on_all_objects_and_pods_but_select_none(
    releases: dict[str, Rendered],
) -> None:
    release = releases["everything"]
    for one in release.objects:
        assert one["metadata"]["labels"]["cost-center"] == "42", one["kind"]
        assert one["metadata"]["annotations"]["example.org/owner"] == "inference", one["kind"]
        assert "cost-center" not in str(one["spec"].get("selector") if "spec" in one else None)
    assert all(pod.labels["cost-center"] == "42" for pod in release.pods())


def _names(release: Rendered, kind: str) -> set[str]:
    return {one["metadata"]["name"] for one in release.of(kind)}


def test_fields_with_the_names_of_kubernetes_are_passed_on(releases: dict[str, Rendered]) -> None:
    service, given = _first(releases["everything"], "Service"), "gateway.service"
    chosen = _value(releases["everything"], given)
    own = {"labels", "annotations", "httpPort", "grpcPort", "httpNodePort", "grpcNodePort"}
    assert {k: v for k, v in chosen.items() if k not in own}.items() <= service["spec"].items()
    assert [(port["port"], port["nodePort"]) for port in service["spec"]["ports"]] == [
        *((chosen["httpPort"], chosen["httpNodePort"]), (chosen["grpcPort"], 30090)),
    ]
    for kind, given in (("HTTPRoute", "gateway.httpRoute"), ("GRPCRoute", "gateway.grpcRoute")):
        route, chosen = (
            _first(releases["gateway-api"], kind),
            _value(releases["gateway-api"], given),
        )
        (rule,) = route["spec"]["rules"]
        found = {**route["spec"], **rule, **route["metadata"], "enabled": True}
        assert chosen.pop("labels").items() <= found["labels"].items()
        assert chosen.items() <= found.items()


def test_an_ingress_has_hosts_paths_and_certificates(releases: dict[str, Rendered]) -> None:
    for ingress in releases["ingress"].of("Ingress"):
        is_grpc = ingress["metadata"]["name"].endswith("-grpc")
        chosen = _value(releases["ingress"], f"gateway.{'grpcIngress' if is_grpc else 'ingress'}")
        assert ingress["metadata"]["annotations"] == chosen["annotations"]
        assert ingress["spec"]["ingressClassName"] == chosen["className"]
        assert ingress["spec"]["tls"] == chosen["tls"]
        found = {
            rule["host"]: [(path["path"], path["pathType"]) for path in rule["http"]["paths"]]
            for rule in ingress["spec"]["rules"]
        }
        assert found == (
            {"grpc.llm.example.org": [("/", "Prefix")]}
            if is_grpc
            else {"llm.example.org": [("/v1", "Prefix"), ("/health", "Prefix")]}
        )


def _first(release: Rendered, kind: str) -> Object:
    return release.of(kind)[0]


def _value(release: Rendered, path: str) -> Object:
    value: Object = dict(release.values)
    for step in path.split("."):
        value = value[step]
    return dict(value)


def test_ways_in_lead_to_the_port_of_their_protocol(releases: dict[str, Rendered]) -> None:
    leads = set()
    for name, release in releases.items():
        for one in release.of("Ingress") + release.of("HTTPRoute") + release.of("GRPCRoute"):
            assert one["metadata"]["name"].endswith(("-http", "-grpc")), name
            protocol = one["metadata"]["name"].rpartition("-")[2]
            for rule in one["spec"]["rules"]:
                for backend in rule.get("backendRefs", ()) or _backends_of_paths(rule):
                    assert _end_of(release, backend) == protocol, (name, one["kind"], backend)
                    leads.add((one["kind"], backend.get("kind", "Service"), protocol))
    assert leads == {
        *(("Ingress", "Service", "http"), ("Ingress", "Service", "grpc")),
        *(("HTTPRoute", "Service", "http"), ("HTTPRoute", "InferencePool", "http")),
        ("GRPCRoute", "Service", "grpc"),
    }


def _backends_of_paths(rule: Object) -> list[Object]:
    return [path["backend"]["service"] for path in rule["http"]["paths"]]


def _end_of(release: Rendered, backend: Object) -> str:
    """The name of the gateway's port that receives a backend's connections."""
    kind = backend.get("kind", "Service")
    (target,) = (o for o in release.of(kind) if o["metadata"]["name"] == backend["name"])
    if kind == "InferencePool":
        assert backend["group"] == target["apiVersion"].partition("/")[0]
        (gateway,) = release.pod("gateway").containers()
        ports = {number: name for name, number in gateway.ports().items()}
        return ports[target["spec"]["targetPorts"][0]["number"]]
    port = backend["port"]
    wanted = {"name": port["name"]} if isinstance(port, dict) else {"port": port}
    (found,) = (one for one in target["spec"]["ports"] if wanted.items() <= one.items())
    return str(found["targetPort"])
