{{- /* The pods of a replica. */ -}}

{{- /* The certificate names of the clients that may call a service of a replica. Argument: list of the root and
the service. */ -}}
{{- define "stepwell.callersEnv" -}}
{{- $root := index . 0 -}}
{{- $service := index . 1 -}}
{{- if $root.Values.tls.internal.enabled }}
{{- $names := list (include "stepwell.tlsName" (list $root "replica")) -}}
{{- if eq $service "scheduler" -}}
{{- $names = concat (list (include "stepwell.tlsName" (list $root "gateway"))) $root.Values.tls.internal.clients -}}
{{- end }}
- name: STEPWELL_{{ upper $service }}_INTERNAL_TLS_ALLOWED_NAMES
  value: {{ join "," $names | quote }}
{{- end }}
{{- end -}}

{{- /* The container of a replica's pool. Only the replica's scheduler reaches it, through a Unix socket. */ -}}
{{- define "stepwell.kvpoolContainer" -}}
{{- $ports := include "stepwell.ports" . | fromYaml -}}
{{- $kvpool := .Values.kvpool -}}
name: kvpool
restartPolicy: Always
{{ include "stepwell.container" (list . $kvpool) }}
ports:
  - {name: kvpool-health, containerPort: {{ $ports.kvpoolHealth }}}
env:
  {{- include "stepwell.commonEnv" (list . "kvpool" $ports.kvpoolHealth 1) | nindent 2 }}
  - name: STEPWELL_KVPOOL_ADDRESS
    value: unix:/run/stepwell/kvpool.sock
  {{- include "stepwell.redisEnv" (list . "kvpool") | nindent 2 }}
  {{- include "stepwell.settings" (list "kvpool" $kvpool.settings) | nindent 2 }}
  {{- include "stepwell.more" $kvpool.extraEnv | nindent 2 }}
{{ include "stepwell.probes" (dict "port" $ports.kvpoolHealth "probes" $kvpool.probes "startFor" "ready" "startSeconds" 60 "unreadySeconds" 2) }}
volumeMounts:
  {{- include "stepwell.runMounts" . | nindent 2 }}
  {{- include "stepwell.redisMounts" . | nindent 2 }}
  {{- include "stepwell.more" $kvpool.extraVolumeMounts | nindent 2 }}
{{- end -}}

{{- /* The container of a worker. Argument: dict of root; address, at which it listens; rank, which is empty if
it is the number at the end of the pod's name; and master, the host of rank 0. */ -}}
{{- define "stepwell.workerContainer" -}}
{{- $root := .root -}}
{{- $ports := include "stepwell.ports" $root | fromYaml -}}
{{- $worker := $root.Values.worker -}}
{{- $size := int (include "stepwell.numRanks" $root) -}}
{{- $hasOthers := gt (int (include "stepwell.numPods" $root)) 1 -}}
{{- include "stepwell.container" (list $root $worker) }}
{{- if and (gt $size 1) (not $hasOthers) }}
command: [python3, -m, services.worker.local_ranks]
{{- end }}
ports:
  - {name: worker-health, containerPort: {{ $ports.workerHealth }}}
  {{- if not (hasPrefix "unix:" .address) }}
  - {name: worker, containerPort: {{ $ports.worker }}}
  {{- end }}
  {{- if and $hasOthers (eq (toString .rank) "0") }}
  - {name: master, containerPort: {{ $ports.master }}}
  {{- end }}
env:
  {{- include "stepwell.commonEnv" (list $root "worker" $ports.workerHealth 1) | nindent 2 }}
  - name: XDG_CACHE_HOME
    value: /cache
  - name: TRITON_CACHE_DIR
    value: /cache/triton
  - name: STEPWELL_WORKER_MODEL
    value: {{ include "stepwell.modelDirectory" $root }}
  - name: STEPWELL_WORKER_SERVED_MODEL_NAME
    value: {{ $root.Values.model.name | quote }}
  - name: STEPWELL_WORKER_ADDRESS
    value: {{ .address | quote }}
  {{- if gt $size 1 }}
  {{- if $hasOthers }}
  {{- include "stepwell.podNameAndAddress" $root | nindent 2 }}
  {{- end }}
  - name: STEPWELL_WORKER_TENSOR_PARALLEL_SIZE
    value: {{ int $root.Values.tensorParallel.size | quote }}
  - name: STEPWELL_WORKER_PIPELINE_PARALLEL_SIZE
    value: {{ int $root.Values.pipelineParallel.size | quote }}
  {{- if and $hasOthers (ne (toString .rank) "") }}
  - name: STEPWELL_WORKER_RANK
    value: {{ .rank | quote }}
  {{- end }}
  - name: STEPWELL_WORKER_MASTER_ADDR
    value: {{ .master | quote }}
  - name: STEPWELL_WORKER_MASTER_PORT
    value: {{ $ports.master | quote }}
  - name: STEPWELL_WORKER_JOIN_TIMEOUT_SECONDS
    value: {{ include "stepwell.text" $root.Values.replicas.startupSeconds | quote }}
  {{- if $hasOthers }}
  {{- include "stepwell.internalTlsEnv" (list $root "worker") | nindent 2 }}
  {{- include "stepwell.callersEnv" (list $root "worker") | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- include "stepwell.settings" (list "worker" $worker.settings) | nindent 2 }}
  {{- include "stepwell.more" $worker.extraEnv | nindent 2 }}
{{ include "stepwell.probes" (dict "port" $ports.workerHealth "probes" $worker.probes "startFor" "ready" "startSeconds" $root.Values.replicas.startupSeconds "unreadySeconds" 2) }}
volumeMounts:
  - {name: model, mountPath: /models, readOnly: true}
  - {name: cache, mountPath: /cache}
  {{- include "stepwell.runMounts" $root | nindent 2 }}
  {{- if $hasOthers }}
  {{- include "stepwell.internalTlsMount" $root | nindent 2 }}
  {{- else if $root.Values.tensorParallel.onePod }}
  - {name: shared-memory, mountPath: /dev/shm}
  {{- end }}
  {{- include "stepwell.more" $worker.extraVolumeMounts | nindent 2 }}
{{- end -}}

{{- /* The container of the scheduler. Argument: dict of root and workers, the addresses of all ranks in rank
order. */ -}}
{{- define "stepwell.schedulerContainer" -}}
{{- $root := .root -}}
{{- $ports := include "stepwell.ports" $root | fromYaml -}}
{{- $scheduler := $root.Values.scheduler -}}
{{- $replicas := $root.Values.replicas -}}
name: scheduler
{{ include "stepwell.container" (list $root $scheduler) }}
ports:
  - {name: scheduler, containerPort: {{ $ports.scheduler }}}
  - {name: health, containerPort: {{ $ports.schedulerHealth }}}
  - {name: metrics, containerPort: {{ $ports.schedulerMetrics }}}
  {{- if $scheduler.vllmGrpc }}
  - {name: vllm-grpc, containerPort: {{ $ports.vllmGrpc }}}
  {{- end }}
env:
  {{- include "stepwell.podNameAndAddress" $root | nindent 2 }}
  {{- include "stepwell.commonEnv" (list $root "scheduler" $ports.schedulerHealth $replicas.drainSeconds) | nindent 2 }}
  - name: STEPWELL_SCHEDULER_REPLICA
    value: $(POD_NAME)
  - name: STEPWELL_SCHEDULER_ADDRESS
    value: {{ include "stepwell.listen" (list $root $ports.scheduler) | quote }}
  - name: STEPWELL_SCHEDULER_KVPOOL
    value: unix:/run/stepwell/kvpool.sock
  - name: STEPWELL_SCHEDULER_WORKERS
    value: {{ join "," .workers | quote }}
  - name: STEPWELL_SCHEDULER_METRICS_ADDRESS
    value: {{ include "stepwell.listen" (list $root $ports.schedulerMetrics) | quote }}
  {{- if include "stepwell.hasRedis" $root }}
  # An address instead of a name, because DNS caches may have the address of the pod's predecessor.
  - name: STEPWELL_SCHEDULER_ADVERTISE_ADDRESS
    value: {{ include "stepwell.podAddress" (list $root $ports.scheduler) | quote }}
  {{- include "stepwell.redisEnv" (list $root "scheduler") | nindent 2 }}
  {{- end }}
  {{- if $scheduler.vllmGrpc }}
  - name: STEPWELL_SCHEDULER_VLLM_GRPC_ADDRESS
    value: {{ include "stepwell.listen" (list $root $ports.vllmGrpc) | quote }}
  - name: STEPWELL_SCHEDULER_MODEL
    value: {{ include "stepwell.modelDirectory" $root }}
  {{- end }}
  {{- include "stepwell.internalTlsEnv" (list $root "scheduler") | nindent 2 }}
  {{- include "stepwell.callersEnv" (list $root "scheduler") | nindent 2 }}
  {{- if $root.Values.tls.internal.enabled }}
  - name: STEPWELL_SCHEDULER_INTERNAL_TLS_SERVER_NAME
    value: {{ include "stepwell.tlsName" (list $root "replica") | quote }}
  {{- end }}
  {{- include "stepwell.settings" (list "scheduler" $scheduler.settings) | nindent 2 }}
  {{- include "stepwell.more" $scheduler.extraEnv | nindent 2 }}
{{- /* A scheduler listens only when its workers have loaded the model, so it may take as long to start. */}}
{{ include "stepwell.probes" (dict "port" $ports.schedulerHealth "probes" $scheduler.probes "startFor" "" "startSeconds" $replicas.startupSeconds "unreadySeconds" 2) }}
{{- if $replicas.preStopSeconds }}
lifecycle:
  preStop:
    sleep: {seconds: {{ $replicas.preStopSeconds }}}
{{- end }}
volumeMounts:
  {{- if $scheduler.vllmGrpc }}
  - {name: model, mountPath: /models, readOnly: true}
  {{- end }}
  {{- include "stepwell.runMounts" $root | nindent 2 }}
  {{- include "stepwell.internalTlsMount" $root | nindent 2 }}
  {{- include "stepwell.redisMounts" $root | nindent 2 }}
  {{- include "stepwell.more" $scheduler.extraVolumeMounts | nindent 2 }}
{{- end -}}

{{- define "stepwell.replicaVolumes" -}}
volumes:
  {{- include "stepwell.volumes" (list . "replica") | nindent 2 }}
  - name: cache
    emptyDir: {sizeLimit: {{ .Values.worker.cacheSize }}}
  {{- if .Values.tensorParallel.onePod }}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.tensorParallel.sharedMemory }}}
  {{- end }}
{{- end -}}

{{- /* The pod with the scheduler, its pool and rank 0. Argument: dict of root; others, the addresses of the
further ranks; and index, the number of the replica if a label must contain it. Pool and worker start
before the scheduler and stop after it, so that the scheduler can drain. */ -}}
{{- define "stepwell.replicaPod" -}}
{{- $root := .root -}}
{{- $replicas := $root.Values.replicas -}}
{{- $own := "unix:/run/stepwell/worker.sock" -}}
{{- $master := "$(POD_IP)" -}}
{{- $workers := prepend .others $own -}}
{{- if and $root.Values.tensorParallel.onePod (gt (int (include "stepwell.numRanks" $root)) 1) -}}
{{- $own = "unix:/run/stepwell/worker-{rank}.sock" -}}
{{- $master = "127.0.0.1" -}}
{{- $workers = list -}}
{{- range $rank := until (int (include "stepwell.numRanks" $root)) -}}
{{- $workers = append $workers (replace "{rank}" (toString $rank) $own) -}}
{{- end -}}
{{- end -}}
metadata:
  {{- include "stepwell.podMetadata" (list $root "replica" $replicas .index) | nindent 2 }}
spec:
  {{- include "stepwell.podSpec" (list $root $replicas) | nindent 2 }}
  {{- include "stepwell.spread" (list $root "replica" $replicas) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $replicas.preStopSeconds $replicas.drainSeconds 15 }}
  initContainers:
    {{- include "stepwell.firstContainers" (list $root "replica") | nindent 4 }}
    - {{- include "stepwell.kvpoolContainer" $root | nindent 6 }}
    - name: worker
      restartPolicy: Always
      {{- include "stepwell.workerContainer" (dict "root" $root "address" $own "rank" 0 "master" $master) | nindent 6 }}
  containers:
    - {{- include "stepwell.schedulerContainer" (dict "root" $root "workers" $workers) | nindent 6 }}
    {{- include "stepwell.more" $replicas.extraContainers | nindent 4 }}
  {{- include "stepwell.replicaVolumes" $root | nindent 2 }}
{{- end -}}

{{- /* The pod of a further rank. Argument: dict of root; rank and master as in workerContainer; index as in
replicaPod; and serveSeconds, the time for which the rank serves after the pod's deletion, so that the
scheduler can drain. */ -}}
{{- define "stepwell.rankPod" -}}
{{- $root := .root -}}
{{- $ports := include "stepwell.ports" $root | fromYaml -}}
metadata:
  {{- include "stepwell.podMetadata" (list $root "rank" $root.Values.replicas .index) | nindent 2 }}
spec:
  {{- include "stepwell.podSpec" (list $root $root.Values.replicas) | nindent 2 }}
  {{- include "stepwell.spread" (list $root "rank" $root.Values.replicas) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add .serveSeconds 15 }}
  {{- with include "stepwell.firstContainers" (list $root "replica") }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      {{- if .serveSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ .serveSeconds }}}
      {{- end }}
      {{- include "stepwell.workerContainer" (dict "root" $root "address" (include "stepwell.listen" (list $root $ports.worker)) "rank" .rank "master" .master) | nindent 6 }}
    {{- include "stepwell.more" $root.Values.replicas.extraContainers | nindent 4 }}
  {{- include "stepwell.replicaVolumes" $root | nindent 2 }}
{{- end -}}
