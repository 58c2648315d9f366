{{- /* The volume with the model's files, and the init container that downloads them. */ -}}

{{- /* The directory of the model in each container. A downloaded model has a directory with its name and
revision, so that another revision is downloaded beside it. */ -}}
{{- define "stepwell.modelDirectory" -}}
{{- list "/models" (trimAll "/" .Values.model.path) (trimPrefix "hf://" .Values.model.download.source) | compact | join "/" -}}
{{- end -}}

{{- /* The time in which a replica becomes ready. A download may take an hour. */ -}}
{{- define "stepwell.readySeconds" -}}
{{- add .Values.replicas.startupSeconds 120 (empty .Values.model.download.source | ternary 0 3600) -}}
{{- end -}}

{{- /* Whether each pod downloads the model into a volume of its own. */ -}}
{{- define "stepwell.hasOwnModels" -}}
{{- $model := .Values.model -}}
{{- if and $model.download.source (not $model.claim.enabled) (or (empty $model.volume) (hasKey (default dict $model.volume) "ephemeral")) -}}true{{- end -}}
{{- end -}}

{{- /* Argument: list of the root and gateway or replica. */ -}}
{{- define "stepwell.modelVolume" -}}
{{- $root := index . 0 -}}
{{- $model := $root.Values.model -}}
- name: model
{{- if $model.claim.enabled }}
  persistentVolumeClaim: {claimName: {{ include "stepwell.fullname" $root }}-model}
{{- else if $model.volume }}
  {{- toYaml $model.volume | nindent 2 }}
{{- else }}
  emptyDir: {sizeLimit: {{ eq (index . 1) "gateway" | ternary "1Gi" $model.download.size }}}
{{- end }}
{{- end -}}

{{- /* The init container as an item of a list, or nothing. Argument: list of the root, whether it is a gateway's,
and the values of its image. */ -}}
{{- define "stepwell.download" -}}
{{- $root := index . 0 -}}
{{- $model := $root.Values.model -}}
{{- $download := $model.download -}}
{{- $ofGateway := index . 1 -}}
{{- $hasEmptyDir := not (or $model.claim.enabled $model.volume) -}}
{{- if $download.source }}
{{- $resources := deepCopy $download.resources -}}
{{- if and $hasEmptyDir (not $ofGateway) -}}
{{- $resources = merge (dict) $resources (dict "requests" (dict "ephemeral-storage" $download.size)) -}}
{{- end -}}
- name: download
  {{- include "stepwell.container" (list $root (dict "image" (index . 2) "resources" $resources)) | nindent 2 }}
  command: [python3, -m, services.download]
  # The end of the log, which names the value to change, is in the status of the pod.
  terminationMessagePolicy: FallbackToLogsOnError
  env:
    - name: HOME
      value: /tmp
    - name: STEPWELL_DOWNLOAD_MODEL
      value: {{ $download.source | quote }}
    - name: STEPWELL_DOWNLOAD_DIRECTORY
      value: {{ include "stepwell.modelDirectory" $root | quote }}
    {{- if and $ofGateway (include "stepwell.hasOwnModels" $root) }}
    - name: STEPWELL_DOWNLOAD_WEIGHTS
      value: "false"
    {{- else if $hasEmptyDir }}
    - name: STEPWELL_DOWNLOAD_SIZE_LIMIT
      value: {{ $download.size | quote }}
    {{- end }}
    - name: STEPWELL_DOWNLOAD_LOG_LEVEL
      value: {{ $root.Values.observability.logLevel }}
    - name: STEPWELL_DOWNLOAD_LOG_FORMAT
      value: {{ $root.Values.observability.logFormat }}
    {{- with $download.endpoint }}
    - name: HF_ENDPOINT
      value: {{ trimSuffix "/" . | quote }}
    {{- end }}
    {{- with $download.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: {{ $download.tokenKey }}}
    {{- end }}
    {{- with $download.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    - {name: model, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
    {{- include "stepwell.more" $download.extraVolumeMounts | nindent 4 }}
{{- end }}
{{- end -}}
