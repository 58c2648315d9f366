"""Probes, updates and security contexts of the Helm chart's pods."""

from tests.deploy.rendered import Object, Rendered


def test_probes_have_the_values_and_their_time_limits(releases: dict[str, Rendered]) -> None:
    everything = {c.service: c.spec for c in releases["everything"].pod("replica").containers()}
    small = {c.service: c.spec for c in releases["small"].pod("replica").containers()}
    assert _times(everything["worker"]["startupProbe"]) == (10, 5, 90)  # 900 s
    assert _times(everything["worker"]["readinessProbe"]) == (2, 5, 3)
    assert _times(everything["scheduler"]["livenessProbe"]) == (10, 10, 6)
    assert _times(small["kvpool"]["startupProbe"]) == (2, 5, 30)
    for service in ("scheduler", "kvpool", "worker"):
        assert _times(small[service]["readinessProbe"]) == (2, 5, 1)
        assert _times(small[service]["livenessProbe"]) == (5, 10, 2)
        assert small[service]["livenessProbe"]["terminationGracePeriodSeconds"] == 5
    (gateway,) = releases["fleet"].pod("gateway").containers()  # waits 60 s for a replica
    assert _times(gateway.spec["readinessProbe"]) == (2, 5, 30)


def _times(probe: Object) -> tuple[int, int, int]:
    return probe["periodSeconds"], probe["timeoutSeconds"], probe["failureThreshold"]


def test_updates_are_rolled_as_the_values_say(releases: dict[str, Rendered]) -> None:
    def of(name: str, kind: str) -> Object:
        return next(one["spec"] for one in releases[name].of(kind))

    assert of("small", "Deployment")["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    assert of("fleet", "Deployment")["strategy"]["rollingUpdate"]["maxSurge"] == "100%"
    assert of("fleet", "StatefulSet")["updateStrategy"]["rollingUpdate"] == {"partition": 1}
    group = of("tensor-parallel-gpu", "LeaderWorkerSet")["rolloutStrategy"]
    assert group["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 1}


def test_openshift_chooses_users_and_groups(releases: dict[str, Rendered]) -> None:
    for pod in releases["openshift"].pods():
        context = pod.spec["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
        assert context["runAsNonRoot"] is True
        assert {kind for v in pod.spec["volumes"] for kind in v if kind != "name"} <= {
            *("persistentVolumeClaim", "emptyDir", "secret", "configMap", "image", "csi"),
        }


def test_another_autoscaler_may_set_the_number_of_replicas(releases: dict[str, Rendered]) -> None:
    release = releases["adjusted"]
    (replicas,) = release.of("StatefulSet")
    assert "replicas" not in replicas["spec"]
    targets = [one["spec"]["scaleTargetRef"] for one in release.of("HorizontalPodAutoscaler")]
    assert [target["kind"] for target in targets] == ["Deployment"]
    environ = release.pod("gateway").containers()[0].environment()
    assert environ["STEPWELL_GATEWAY_EXPECTED_REPLICAS"] == "2"
