"""References between the Helm chart's objects agree: ports, labels, secrets, volumes, times."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

from tests.deploy.conftest import example, render_chart
from tests.deploy.network_policies import STRANGER, Policies
from tests.deploy.rendered import Container, Object, Rendered, selects

TEMPLATED = ("Deployment", "StatefulSet")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_UNITS = {"m": "0.001", "": "1", "Mi": str(2**20), "Gi": str(2**30)}


def test_probes_ask_where_the_container_answers(release: Rendered) -> None:
    for container in release.containers():
        if container.service is None:
            continue
        environ = container.environment()
        health = environ[f"STEPWELL_{container.service.upper()}_HEALTH_ADDRESS"]
        for kind in PROBES:
            probe = container.spec[kind]
            assert probe["grpc"]["port"] in container.ports().values(), container.name
            assert health.endswith(f":{probe['grpc']['port']}"), container.name
        asked = [container.spec[kind]["grpc"]["service"] for kind in PROBES]
        # The startup probe of a gateway succeeds before a replica is ready. A scheduler listens
        # only once its workers serve. Where requests start the first replica, a gateway gets
        # requests although no replica is ready.
        waits = container.service in ("kvpool", "worker")
        starts = container.service == "gateway" and release.name == "scale-to-zero"
        assert asked == ["ready" if waits else "", "" if starts else "ready", ""], container.name


def test_metrics_are_served_at_the_port_that_is_scraped(release: Rendered) -> None:
    """No Kubernetes Service has both ports: metrics name tenants, so clients must not see them."""
    served = set()
    for container in release.containers():
        variable = f"STEPWELL_{(container.service or '').upper()}_METRICS_ADDRESS"
        address = container.environment().get(variable)
        if address is not None:
            served.add(container.service)
            assert address.endswith(f":{container.ports()['metrics']}"), container.name
    assert served == {"gateway", "scheduler"} & release.services
    for service in release.of("Service"):
        offered = {port["targetPort"] for port in service["spec"]["ports"]}
        assert not {"http", "metrics"} <= offered, service["metadata"]["name"]


def test_probes_of_other_programs_name_a_port(releases: dict[str, Rendered]) -> None:
    redis = releases["everything"].pod("redis").containers()[0]
    for kind in PROBES:
        assert redis.spec[kind]["tcpSocket"]["port"] in redis.ports()


def test_a_worker_has_the_time_that_its_model_takes_to_load(releases: dict[str, Rendered]) -> None:
    for name, seconds in (("small", 900), ("tensor-parallel-gpu", 1800)):
        for container in releases[name].containers():
            if container.service in ("worker", "scheduler"):
                probe = container.spec["startupProbe"]
                assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


def test_ports_of_a_pod_differ(release: Rendered) -> None:
    for pod in release.pods():
        ports = [port for container in pod.containers() for port in container.ports().values()]
        assert len(ports) == len(set(ports)), pod.component


def test_services_of_a_pod_write_different_health_files(release: Rendered) -> None:
    """Each service replaces its file once a second, which fails if another one does the same."""
    for pod in release.pods():
        services = [container for container in pod.containers() if container.service]
        files = [
            container.environment()[f"STEPWELL_{str(container.service).upper()}_HEALTH_FILE"]
            for container in services
        ]
        assert len(files) == len(set(files)), pod.component
        for container, file in zip(services, files, strict=True):
            assert str(PurePosixPath(file).parent) in container.mounts(), container.name


def test_services_lead_to_ports_of_pods(release: Rendered) -> None:
    for service in release.of("Service"):
        pods = [p for p in release.pods() if selects(_match(service), p.labels)]
        assert pods, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            for pod in pods:
                ports = {name: n for c in pod.containers() for name, n in c.ports().items()}
                assert port["targetPort"] in ports, (service["metadata"]["name"], port)


def _match(service: Object) -> Object:
    return {"matchLabels": service["spec"]["selector"]}


def test_selectors_match_their_own_pods_alone(release: Rendered) -> None:
    templates = [one for one in release.objects if one["kind"] in TEMPLATED]
    for one in templates:
        own = [pod for pod in release.pods() if pod.owner is one]
        selected = [p for p in release.pods() if selects(one["spec"]["selector"], p.labels)]
        assert own == selected, one["metadata"]["name"]
    names = [(one["kind"], one["metadata"]["name"]) for one in release.objects]
    assert len(names) == len(set(names))


def test_what_selects_pods_or_services_finds_some(release: Rendered) -> None:
    pods = release.pods()
    selectors = [one["spec"]["podSelector"] for one in release.of("NetworkPolicy")]
    selectors += [one["spec"]["selector"] for one in release.of("PodDisruptionBudget")]
    selectors += [one["spec"]["selector"] for one in release.of("InferencePool")]
    for selector in selectors:
        assert any(selects(selector, pod.labels) for pod in pods), selector
    for pod in pods:
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert selects(constraint["labelSelector"], pod.labels), pod.component
    for monitor in release.of("ServiceMonitor"):
        services = [
            service
            for service in release.of("Service")
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
        ]
        offered = {port["name"] for service in services for port in service["spec"]["ports"]}
        assert {end["port"] for end in monitor["spec"]["endpoints"]} <= offered
        # A pod that still downloads its model is not down.
        pending = {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Pending"}
        for end in monitor["spec"]["endpoints"]:
            assert end["relabelings"][0] == {**pending, "action": "drop"}
            # Alerts recognize the job, whatever the release's name is.
            assert end["relabelings"][1]["targetLabel"] == "job"
            assert "stepwell" in end["relabelings"][1]["replacement"]
    for scaler in release.of("HorizontalPodAutoscaler") + release.of("ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        (scaled,) = (
            one for one in release.of(target["kind"]) if one["metadata"]["name"] == target["name"]
        )
        assert scaled["apiVersion"] == target["apiVersion"]
        assert "replicas" not in scaled["spec"]


def test_an_inference_pool_has_the_port_of_its_pods(releases: dict[str, Rendered]) -> None:
    release = releases["everything"]
    (pool,) = release.of("InferencePool")
    scheduler = release.pod("replica").containers()[-1]
    assert pool["spec"]["targetPorts"] == [{"number": scheduler.ports()["vllm-grpc"]}]
    address = scheduler.environment()["STEPWELL_SCHEDULER_VLLM_GRPC_ADDRESS"]
    assert address == f"[::]:{scheduler.ports()['vllm-grpc']}"


def test_pods_stop_gracefully_and_take_nothing_that_they_do_not_need(release: Rendered) -> None:
    for pod in release.pods():
        spec = pod.spec
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        own_user = None if release.name == "openshift" else 10001
        assert spec["securityContext"].get("runAsUser") == own_user
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers():
            context = container.spec["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert _fits(container.spec["resources"]), container.name
            assert container.mounts(), container.name
            assert spec.get("terminationGracePeriodSeconds", 30) > _stop_seconds(container)


def test_pool_and_workers_outlive_the_scheduler_of_their_group(release: Rendered) -> None:
    replica = release.pod("replica")
    services = {c.service: c for c in replica.containers() if c.service is not None}
    assert list(services) == ["kvpool", "worker", "scheduler"]
    for service in ("kvpool", "worker"):
        assert services[service].spec in replica.spec["initContainers"]
        assert services[service].spec["restartPolicy"] == "Always"
    scheduler = services["scheduler"]
    assert scheduler.spec in replica.spec["containers"]
    for rank in (pod for pod in release.pods() if pod.component == "rank"):
        (worker,) = (c for c in rank.containers() if c.service is not None)
        # A StatefulSet's ranks are deleted with their scheduler, a LeaderWorkerSet's are not.
        is_deleted_with_scheduler = rank.owner["kind"] == "StatefulSet"
        assert (_stop_seconds(worker) > _stop_seconds(scheduler)) == is_deleted_with_scheduler


def _stop_seconds(container: Container) -> float:
    """The seconds that the container may need to end after its pod was deleted."""
    environ = container.environment()
    drain = float(environ.get(f"STEPWELL_{(container.service or '').upper()}_DRAIN_SECONDS", 0))
    before = container.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    return drain + float(before.get("seconds", 0))


def _fits(resources: Object) -> bool:
    """Whether requests of CPU and memory exist, and no resource request exceeds its limit."""
    requests, limits = resources["requests"], resources.get("limits", {})
    assert {"cpu", "memory"} <= requests.keys()
    return all(_amount(requests[n]) <= _amount(limits[n]) for n in requests if n in limits)


def _amount(quantity: str | int) -> Decimal:
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert found is not None, quantity
    return Decimal(found[1]) * Decimal(_UNITS[found[2]])


def test_no_manifest_holds_a_secret(release: Rendered) -> None:
    assert release.of("Secret") == []
    for container in release.containers():
        for variable in container.spec.get("env", ()):
            is_secret = variable["name"].endswith(("PASSWORD", "API_KEY", "API_KEYS"))
            if is_secret:
                assert "secretKeyRef" in variable["valueFrom"], variable
            if variable["name"].endswith("REDIS_URL") and "value" in variable:
                user = re.match(r"redis://(?:(.*)@)?[^@]*$", variable["value"])
                assert user is not None
                assert user[1] in (None, ":$(REDIS_PASSWORD)"), variable
    for text in _texts(release.objects):
        assert not re.search(r"sk-[\w-]{8,}|BEGIN [A-Z ]*PRIVATE KEY", text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, str):
        yield value
    elif not isinstance(value, int | float | None):
        for inside in value:
            yield from _texts(inside)


def test_network_policies_let_through_what_services_need_and_nothing_else(
    release: Rendered,
) -> None:
    policies = Policies(release)
    labels = {pod.component: dict(pod.labels) for pod in release.pods()}
    ports = {
        pod.component: {n: p for c in pod.containers() for n, p in c.ports().items()}
        for pod in release.pods()
    }
    if "gateway" not in labels:  # those of another release
        labels["gateway"] = labels["replica"] | {
            "app.kubernetes.io/component": "gateway",
            "app.kubernetes.io/instance": release.values["gateway"]["ofRelease"],
        }
    needed = {("gateway", "replica", ports["replica"]["scheduler"])}
    if "test" in labels:
        needed |= {("test", "gateway", ports["gateway"]["http"])}
    if "redis" in labels:
        needed |= {(one, "redis", ports["redis"]["redis"]) for one in ("gateway", "replica")}
    if "rank" in labels:
        needed |= {("replica", "rank", ports["rank"]["worker"])}
        needed |= {("rank", "replica", port) for port in (ports["replica"]["master"], 40_000)}
        needed |= {("replica", "rank", 40_000), ("rank", "rank", 40_000)}
    for source, target, port in needed:
        assert policies.let_through(labels[source], labels[target], port), (source, target, port)
    for target, of_target in ports.items():
        for name, port in of_target.items():
            if target != "test" and name not in ("http", "grpc", "vllm-grpc", "metrics"):
                assert not policies.let_through(STRANGER, labels[target], port), (target, name)
    assert not policies.let_through(labels["gateway"], labels["replica"], 9011)
    assert not policies.let_through(labels["replica"], labels["gateway"], 8000)


def test_restricted_networks_keep_strangers_out(releases: dict[str, Rendered]) -> None:
    release = releases["everything"]
    policies = Policies(release)
    for component, port in (("gateway", 8000), ("replica", 9101), ("replica", 9100)):
        assert not policies.let_through(STRANGER, dict(release.pod(component).labels), port)


def test_certificates_carry_the_names_that_services_look_for(releases: dict[str, Rendered]) -> None:
    release = releases["tls-cert-manager"]
    names = {c["spec"]["secretName"]: c["spec"]["dnsNames"] for c in _leaves(release)}
    (edge,) = release.pod("gateway").containers()
    scheduler = release.pod("replica").containers()[-1]
    of_edge, of_scheduler = (
        names[container.mounts()["/etc/stepwell/internal-tls"]["secret"]["secretName"]]
        for container in (edge, scheduler)
    )
    assert edge.environment()["STEPWELL_GATEWAY_INTERNAL_TLS_SERVER_NAME"] in of_scheduler
    allowed = scheduler.environment()["STEPWELL_SCHEDULER_INTERNAL_TLS_ALLOWED_NAMES"].split(",")
    assert set(allowed) & set(of_edge)
    assert not set(allowed) & set(of_scheduler)


def test_a_public_certificate_has_the_given_names_only(releases: dict[str, Rendered]) -> None:
    """Authorities on the internet refuse a certificate that also has a name of the cluster."""
    release = releases["tls-cert-manager"]
    assert _public_names(release) == ["llm.example.org"]
    assert "nothing to run: tls.public.certManager.dnsNames has no name" in release.notes


def test_the_test_finds_its_host_in_the_public_certificate(releases: dict[str, Rendered]) -> None:
    tls = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "platform"}}}
    of_cluster = render_chart({"of cluster": example("small", tls={"public": tls})})
    for release in (releases["adjusted"], *of_cluster.values()):
        test = release.pod("test").containers()[0].spec["command"]
        host = re.search(r"https://([^:]+):", " ".join(test))
        assert host is not None
        assert host[1] in _public_names(release)


def _public_names(release: Rendered) -> list[str]:
    (edge,) = release.pod("gateway").containers()
    public = edge.mounts()["/etc/stepwell/public-tls"]["secret"]["secretName"]
    (names,) = [
        c["spec"]["dnsNames"] for c in _leaves(release) if c["spec"]["secretName"] == public
    ]
    return list(names)


def test_ranks_let_schedulers_of_their_release_call(releases: dict[str, Rendered]) -> None:
    release = releases["groups"]
    names = {c["spec"]["secretName"]: c["spec"]["dnsNames"] for c in _leaves(release)}
    (rank,) = release.pod("rank").containers()
    scheduler = release.pod("replica").containers()[-1]
    shown = names[scheduler.mounts()["/etc/stepwell/internal-tls"]["secret"]["secretName"]]
    assert rank.environment()["STEPWELL_WORKER_INTERNAL_TLS_ALLOWED_NAMES"] in shown
    assert scheduler.environment()["STEPWELL_SCHEDULER_INTERNAL_TLS_SERVER_NAME"] in shown


def _leaves(release: Rendered) -> list[Object]:
    return [one for one in release.of("Certificate") if not one["spec"].get("isCA")]


def test_every_secret_is_one_that_the_values_or_cert_manager_name(
    releases: dict[str, Rendered],
) -> None:
    for release in releases.values():
        made = {one["spec"]["secretName"] for one in release.of("Certificate")}
        given = set(_texts(release.values))
        for pod in release.pods():
            secrets = [v["secret"]["secretName"] for v in pod.spec["volumes"] if "secret" in v]
            for container in pod.containers():
                for variable in container.spec.get("env", ()):
                    reference = variable.get("valueFrom", {}).get("secretKeyRef")
                    secrets += [reference["name"]] if reference else []
            assert set(secrets) <= made | given, (release.name, pod.component)
