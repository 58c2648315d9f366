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

{{- /* The init container that downloads the model, as an item of a list, or nothing. Argument: list of the root,
whether it is a gateway's, and the values of its image. */ -}}
{{- define "stepwell.download" -}}
{{- $root := index . 0 -}}
{{- $ofGateway := index . 1 -}}
{{- $model := $root.Values.model -}}
{{- $download := $model.download -}}
{{- if $download.source -}}
{{- $weights := not (and $ofGateway (include "stepwell.hasOwnModels" $root)) -}}
{{- $resources := $download.resources -}}
{{- $sizeLimit := "" -}}
{{- if not (or $model.claim.enabled $model.volume) -}}
{{- $sizeLimit = $ofGateway | ternary "1Gi" $download.size -}}
{{- if not $ofGateway -}}
{{- $resources = merge (dict) $resources (dict "requests" (dict "ephemeral-storage" $sizeLimit)) -}}
{{- end -}}
{{- end -}}
{{- include "stepwell.downloadContainer" (dict "root" $root "image" (index . 2) "name" "download" "source" $download.source "directory" (include "stepwell.modelDirectory" $root) "volume" "model" "mountPath" "/models" "weights" $weights "sizeLimit" $sizeLimit "resources" $resources) }}
{{- end }}
{{- end -}}

{{- /* Argument: dict of root; image, the values of its image; name; source, the model on the hub; directory,
volume and mountPath; weights, whether it downloads them; sizeLimit, which may be empty; and resources. */ -}}
{{- define "stepwell.downloadContainer" -}}
{{- $download := .root.Values.model.download -}}
- name: {{ .name }}
  {{- include "stepwell.container" (list .root (dict "image" .image "resources" .resources)) | nindent 2 }}
  command: [python3, -m, services.download]
  # The end of the log, which names the value to change, is in the status of the pod.
  terminationMessagePolicy: FallbackToLogsOnError
  env:
    - name: HOME
      value: /tmp
    - name: STEPWELL_DOWNLOAD_MODEL
      value: {{ .source | quote }}
    - name: STEPWELL_DOWNLOAD_DIRECTORY
      value: {{ .directory | quote }}
    - name: STEPWELL_DOWNLOAD_WEIGHTS
      value: {{ .weights | quote }}
    {{- with .sizeLimit }}
    - name: STEPWELL_DOWNLOAD_SIZE_LIMIT
      value: {{ . | quote }}
    {{- end }}
    - name: STEPWELL_DOWNLOAD_LOG_LEVEL
      value: {{ .root.Values.observability.logLevel }}
    - name: STEPWELL_DOWNLOAD_LOG_FORMAT
      value: {{ .root.Values.observability.logFormat }}
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
    - {name: {{ .volume }}, mountPath: {{ .mountPath }}}
    - {name: tmp, mountPath: /tmp}
    {{- include "stepwell.more" $download.extraVolumeMounts | nindent 4 }}
{{- end -}}

{{- /* Whether an init container downloads from the hub. */ -}}
{{- define "stepwell.downloads" -}}
{{- range prepend .Values.gateway.furtherModels (dict "source" .Values.model.download.source) -}}
{{- if .source }}true{{ end -}}
{{- end -}}
{{- end -}}
