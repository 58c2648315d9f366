{{- /* Names, labels, ports and images. */ -}}

{{- /* The prefix of all object names of the release. It is short enough that "-replica-12-3" and a revision
can follow. A longer prefix is cut and gets its hash, so that two releases never have the same names. */ -}}
{{- define "stepwell.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- $full = default $full .Values.fullnameOverride -}}
{{- if gt (len $full) 36 -}}
{{- printf "%s-%s" ($full | trunc 27 | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{- /* The labels with which a component is selected. Argument: list of the root and the component. */ -}}
{{- define "stepwell.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* The labels of a component of another release of this chart, with the same nameOverride. Argument: list
of the root, the component and the release's name. */ -}}
{{- define "stepwell.selectorOf" -}}
{{- $labels := include "stepwell.selector" (list (index . 0) (index . 1)) | fromYaml -}}
{{- set $labels "app.kubernetes.io/instance" (index . 2) | toYaml -}}
{{- end -}}

{{- /* Whether this release has gateways of its own. */ -}}
{{- define "stepwell.hasGateways" -}}
{{- if empty .Values.gateway.ofRelease -}}true{{- end -}}
{{- end -}}

{{- define "stepwell.labels" -}}
{{- $root := index . 0 -}}
{{ include "stepwell.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: stepwell
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- /* The metadata of an object. Argument: list of the root, the component, the suffix of the name and, if the
object has its own labels or annotations, a dict of both. */ -}}
{{- define "stepwell.metadata" -}}
{{- $root := index . 0 -}}
{{- $own := gt (len .) 3 | ternary (last .) dict -}}
name: {{ $own.name | default (printf "%s%s" (include "stepwell.fullname" $root) (index . 2)) }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "stepwell.labels" (list $root (index . 1)) | nindent 2 }}
  {{- include "stepwell.more" (merge dict ($own.labels | default dict) $root.Values.commonLabels) | nindent 2 }}
{{- with merge dict ($own.annotations | default dict) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* A list or map of the values, or nothing if it is empty. */ -}}
{{- define "stepwell.more" -}}
{{- with . }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- /* Fields that have the same name in the values. Argument: list of the values and the names of the fields.
Empty values are left out. */ -}}
{{- define "stepwell.given" -}}
{{- $given := dict -}}
{{- range $name := rest . -}}
{{- $value := get (first $) $name -}}
{{- if or $value (kindIs "bool" $value) }}{{ $_ := set $given $name $value }}{{ end -}}
{{- end -}}
{{- include "stepwell.more" $given -}}
{{- end -}}

{{- /* The ports of containers. All services of a replica have different ports, because they are in one pod. */ -}}
{{- define "stepwell.ports" -}}
http: 8000
grpc: 9000
scheduler: 9001
worker: 9003
gatewayHealth: 9010
schedulerHealth: 9011
kvpoolHealth: 9012
workerHealth: 9013
vllmGrpc: 9100
schedulerMetrics: 9101
gatewayMetrics: 9102
redis: 6379
# The port at which rank 0 of a model waits for the other ranks.
master: 29500
{{- end -}}

{{- /* The reference of an image. Argument: list of the root and the image's values. A digest replaces the
tag. */ -}}
{{- define "stepwell.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := coalesce $root.Values.global.imageRegistry $image.registry $root.Values.image.registry | default "" -}}
{{- $repository := empty $registry | ternary $image.repository (printf "%s/%s" (trimSuffix "/" $registry) $image.repository) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (coalesce $image.tag $root.Values.image.tag $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "stepwell.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "stepwell.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* host:port with which a service listens at all addresses of its pod. Argument: list of the root and
the port. */ -}}
{{- define "stepwell.listen" -}}
{{- $root := index . 0 -}}
{{- printf "%s:%v" (eq $root.Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0") (index . 1) -}}
{{- end -}}

{{- /* host:port of the pod itself, for environment variables after POD_IP. Argument: list of the root and
the port. */ -}}
{{- define "stepwell.podAddress" -}}
{{- $root := index . 0 -}}
{{- printf (eq $root.Values.ipFamily "IPv6" | ternary "[$(POD_IP)]:%v" "$(POD_IP):%v") (index . 1) -}}
{{- end -}}

{{- define "stepwell.hasRedis" -}}
{{- if or .Values.redis.existingSecret .Values.redis.internal.enabled -}}true{{- end -}}
{{- end -}}

{{- /* Whether no replica may run while there are no requests. */ -}}
{{- define "stepwell.scalesToZero" -}}
{{- if and (has .Values.replicas.autoscaling.kind (list "keda" "external")) (eq (int .Values.replicas.autoscaling.minReplicas) 0) -}}true{{- end -}}
{{- end -}}

{{- /* The number of ranks of a model. */ -}}
{{- define "stepwell.numRanks" -}}
{{- mul (int .Values.tensorParallel.size) (int .Values.pipelineParallel.size) -}}
{{- end -}}

{{- /* The number of pods of a replica. */ -}}
{{- define "stepwell.numPods" -}}
{{- .Values.tensorParallel.onePod | ternary 1 (include "stepwell.numRanks" .) -}}
{{- end -}}

{{- /* Whether replicas of several pods are a LeaderWorkerSet. */ -}}
{{- define "stepwell.hasLeaderWorkerSet" -}}
{{- $wanted := .Values.tensorParallel.leaderWorkerSet -}}
{{- if eq $wanted "always" -}}true
{{- else if and (eq $wanted "auto") (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}true
{{- end -}}
{{- end -}}

{{- /* The name in an internal certificate. Argument: list of the root and gateway or replica. */ -}}
{{- define "stepwell.tlsName" -}}
{{- $root := index . 0 -}}
{{- $of := index . 1 -}}
{{- get $root.Values.tls.internal.names $of | default (printf "%s-%s.%s.svc" (include "stepwell.fullname" $root) $of $root.Release.Namespace) -}}
{{- end -}}

{{- /* The secret with an internal certificate. Argument: list of the root and gateway or replica. */ -}}
{{- define "stepwell.internalTlsSecret" -}}
{{- $root := index . 0 -}}
{{- $of := index . 1 -}}
{{- $made := printf "%s-%s-internal-tls" (include "stepwell.fullname" $root) $of -}}
{{- $root.Values.tls.internal.certManager.enabled | ternary $made (get $root.Values.tls.internal.existingSecrets $of) -}}
{{- end -}}

{{- /* The name of the gateways' Service in the cluster. */ -}}
{{- define "stepwell.gatewayHost" -}}
{{- printf "%s-gateway.%s.svc" (include "stepwell.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- /* The names in the public certificate, as a list. An authority on the internet, such as Let's Encrypt,
issues no certificate that also has a name of the cluster. */ -}}
{{- define "stepwell.publicNames" -}}
{{- .Values.tls.public.certManager.dnsNames | default (list (include "stepwell.gatewayHost" .)) | toYaml -}}
{{- end -}}

{{- define "stepwell.publicTlsSecret" -}}
{{- $made := printf "%s-gateway-public-tls" (include "stepwell.fullname" .) -}}
{{- .Values.tls.public.certManager.enabled | ternary $made .Values.tls.public.existingSecret -}}
{{- end -}}
