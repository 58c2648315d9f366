{{- /* Parts of pods that several components use. */ -}}

{{- /* A value as the text of an environment variable. Large numbers in YAML are floats in a template. */ -}}
{{- define "stepwell.text" -}}
{{- if kindIs "slice" . -}}
{{- $texts := list -}}
{{- range . }}{{ $texts = append $texts (include "stepwell.text" .) }}{{ end -}}
{{- join "," $texts -}}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- /* Environment variables for `settings` in the values. Argument: list of the service and its settings. */ -}}
{{- define "stepwell.settings" -}}
{{- $service := index . 0 -}}
{{- range $name, $value := index . 1 }}
- name: STEPWELL_{{ upper $service }}_{{ upper $name }}
  value: {{ include "stepwell.text" $value | quote }}
{{- end }}
{{- end -}}

{{- /* Environment variables of every service. Argument: list of the root, the service, its health port and
its drain time in seconds. */ -}}
{{- define "stepwell.commonEnv" -}}
{{- $root := index . 0 -}}
{{- $prefix := printf "STEPWELL_%s" (upper (index . 1)) -}}
{{- $seen := $root.Values.observability -}}
- name: HOME
  value: /tmp
- name: {{ $prefix }}_HEALTH_ADDRESS
  value: {{ include "stepwell.listen" (list $root (index . 2)) | quote }}
# The containers of a pod share /tmp, in which all images have the same health file.
- name: {{ $prefix }}_HEALTH_FILE
  value: /tmp/{{ index . 1 }}.health
- name: {{ $prefix }}_DRAIN_SECONDS
  value: {{ include "stepwell.text" (index . 3) | quote }}
- name: {{ $prefix }}_LOG_LEVEL
  value: {{ $seen.logLevel }}
- name: {{ $prefix }}_LOG_FORMAT
  value: {{ $seen.logFormat }}
{{- if $seen.otlpEndpoint }}
- name: {{ $prefix }}_OTLP_ENDPOINT
  value: {{ $seen.otlpEndpoint | quote }}
- name: {{ $prefix }}_TRACE_SAMPLE_RATIO
  value: {{ include "stepwell.text" $seen.traceSampleRatio | quote }}
{{- end }}
{{- end -}}

{{- /* Environment variables with the URL of Redis. Argument: list of the root and the service. The manifest
does not contain the password. A service reads the file of an existing secret again. */ -}}
{{- define "stepwell.redisEnv" -}}
{{- $root := index . 0 -}}
{{- $redis := $root.Values.redis -}}
{{- $name := printf "STEPWELL_%s_REDIS_URL" (upper (index . 1)) -}}
{{- $host := printf "%s-redis.%s.svc:%v" (include "stepwell.fullname" $root) $root.Release.Namespace (include "stepwell.ports" $root | fromYaml).redis -}}
{{- if $redis.existingSecret }}
- name: {{ $name }}_FILE
  value: /etc/stepwell/redis-url/url
{{- else if and $redis.internal.enabled $redis.internal.passwordSecret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $redis.internal.passwordSecret }}, key: {{ $redis.internal.passwordKey }}}
- name: {{ $name }}
  value: redis://:$(REDIS_PASSWORD)@{{ $host }}
{{- else if $redis.internal.enabled }}
- name: {{ $name }}
  value: redis://{{ $host }}
{{- end }}
{{- end -}}

{{- /* Environment variables with the files of the internal certificate. Argument: list of the root and the
service. */ -}}
{{- define "stepwell.internalTlsEnv" -}}
{{- $root := index . 0 -}}
{{- $prefix := printf "STEPWELL_%s_INTERNAL_TLS" (upper (index . 1)) -}}
{{- if $root.Values.tls.internal.enabled }}
- name: {{ $prefix }}_CERT_FILE
  value: /etc/stepwell/internal-tls/tls.crt
- name: {{ $prefix }}_KEY_FILE
  value: /etc/stepwell/internal-tls/tls.key
- name: {{ $prefix }}_CA_FILE
  value: /etc/stepwell/internal-tls/ca.crt
{{- end }}
{{- end -}}

{{- define "stepwell.podNameAndAddress" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- /* Probes over grpc.health.v1 without TLS. Argument: dict of
port;
probes, the values of the service's probes;
startFor, the name of the service that the startup probe checks, and its time limit startSeconds;
readyFor, the name of the service that the readiness probe checks, if it is not `ready`;
unreadySeconds, the time after which a pod that is not ready is removed from its Service. */ -}}
{{- define "stepwell.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}, service: {{ .startFor | quote }}}
  {{- include "stepwell.probe" (list .probes.startup .startSeconds) | nindent 2 }}
readinessProbe:
  grpc: {port: {{ .port }}, service: {{ hasKey . "readyFor" | ternary .readyFor "ready" | quote }}}
  {{- include "stepwell.probe" (list .probes.readiness .unreadySeconds) | nindent 2 }}
livenessProbe:
  grpc: {port: {{ .port }}, service: ""}
  {{- toYaml .probes.liveness | nindent 2 }}
{{- end -}}

{{- /* The fields of a probe. Argument: list of its values, and the seconds after which it has failed if the
values have no failureThreshold. */ -}}
{{- define "stepwell.probe" -}}
{{- $period := int (default 10 (index . 0).periodSeconds) -}}
{{- $failures := div (add (int (index . 1)) $period -1) $period | max 1 -}}
{{- toYaml (merge (dict) (index . 0) (dict "failureThreshold" $failures)) -}}
{{- end -}}

{{- /* Fields of the spec of every pod. Argument: list of the root and the values of its component. */ -}}
{{- define "stepwell.podSpec" -}}
{{- $root := index . 0 -}}
{{- $of := index . 1 -}}
serviceAccountName: {{ include "stepwell.serviceAccountName" $root }}
automountServiceAccountToken: false
# Otherwise Kubernetes sets variables such as STEPWELL_GATEWAY_PORT, which are not settings.
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with concat ($root.Values.global.imagePullSecrets | default list) $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {{ kindIs "map" . | ternary . (dict "name" .) | toJson }}
  {{- end }}
{{- end }}
{{ include "stepwell.given" (list $of "priorityClassName" "runtimeClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" "hostAliases" "dnsPolicy" "dnsConfig" "resourceClaims") }}
{{- end -}}

{{- /* The init containers that end before the services start, as items of a list. Argument: list of the root and
gateway or replica. */ -}}
{{- define "stepwell.firstContainers" -}}
{{- $values := (index . 0).Values -}}
{{- $ofGateway := eq (index . 1) "gateway" -}}
{{- with ($ofGateway | ternary $values.gateway $values.replicas).extraInitContainers }}
{{- toYaml . }}
{{ end }}
{{- with include "stepwell.download" (list (index . 0) $ofGateway ($ofGateway | ternary $values.gateway.image $values.worker.image)) }}
{{- . }}
{{ end }}
{{- range $number, $further := $ofGateway | ternary $values.gateway.furtherModels list }}
{{- if $further.source }}
{{- $path := printf "/further-models/%d" $number -}}
{{- include "stepwell.downloadContainer" (dict "root" (index $ 0) "image" $values.gateway.image "name" (printf "download-%d" $number) "source" $further.source "directory" (printf "%s/%s" $path (trimPrefix "hf://" $further.source)) "volume" (printf "model-%d" $number) "mountPath" $path "weights" false "sizeLimit" "1Gi" "resources" $values.model.download.resources) }}
{{ end }}
{{- end }}
{{- end -}}

{{- /* Spreads a component's pods over nodes. Argument: list of the root, the component and its values. */ -}}
{{- define "stepwell.spread" -}}
{{- $root := index . 0 -}}
topologySpreadConstraints:
{{- with (index . 2).topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "stepwell.selector" (list $root (index . 1)) | nindent 8 }}
{{- end }}
{{- end -}}

{{- /* The metadata of a pod template. Argument: list of the root, the component and its values. If each replica
has its own StatefulSets, the number of the replica follows. */ -}}
{{- define "stepwell.podMetadata" -}}
{{- $of := index . 2 -}}
labels:
  {{- include "stepwell.selector" (list (index . 0) (index . 1)) | nindent 2 }}
  {{- if and (gt (len .) 3) (kindIs "int" (index . 3)) }}
  stepwell-replica: {{ index . 3 | quote }}
  {{- end }}
  {{- include "stepwell.more" (merge dict ($of.podLabels | default dict) (index . 0).Values.commonLabels) | nindent 2 }}
{{- with $of.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Fields of every container. Argument: list of the root and the values of its service. */ -}}
{{- define "stepwell.container" -}}
{{- $root := index . 0 -}}
{{- $of := index . 1 -}}
image: {{ include "stepwell.image" (list $root $of.image) }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml $root.Values.containerSecurityContext | nindent 2 }}
resources:
  {{- toYaml $of.resources | nindent 2 }}
{{- with $of.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Volumes of all pods of services. Argument: list of the root and gateway or replica. */ -}}
{{- define "stepwell.volumes" -}}
{{- $root := index . 0 -}}
{{ include "stepwell.modelVolume" . }}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if $root.Values.tls.internal.enabled }}
- name: internal-tls
  secret: {secretName: {{ include "stepwell.internalTlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- with $root.Values.redis.existingSecret }}
- name: redis-url
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: {{ $root.Values.redis.urlKey }}, path: url}
{{- end }}
{{- with $root.Values.redis.tlsSecret }}
- name: redis-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{ include "stepwell.more" (get $root.Values (eq (index . 1) "gateway" | ternary "gateway" "replicas")).extraVolumes }}
{{- end -}}

{{- define "stepwell.runMounts" -}}
- {name: run, mountPath: /run/stepwell}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "stepwell.internalTlsMount" -}}
{{- if .Values.tls.internal.enabled }}
- {name: internal-tls, mountPath: /etc/stepwell/internal-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "stepwell.redisMounts" -}}
{{- if .Values.redis.existingSecret }}
- {name: redis-url, mountPath: /etc/stepwell/redis-url, readOnly: true}
{{- end }}
{{- if .Values.redis.tlsSecret }}
- {name: redis-tls, mountPath: /etc/stepwell/redis, readOnly: true}
{{- end }}
{{- end -}}
