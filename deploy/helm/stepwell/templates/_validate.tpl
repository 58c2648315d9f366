{{- /* Checks that the schema of the values cannot express. Each failure is one sentence that names the
value. */ -}}
{{- define "stepwell.validate" -}}
{{- $values := .Values -}}
{{- $redis := include "stepwell.hasRedis" . -}}
{{- $scales := ne $values.replicas.autoscaling.kind "none" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "stepwell.fullname" .)) -}}
{{- fail (printf "the objects would be named %s-…, but names of services begin with a letter and have lower-case letters, digits and hyphens: set fullnameOverride" (include "stepwell.fullname" .)) -}}
{{- end -}}
{{- range $service := list "gateway" "scheduler" "kvpool" "worker" -}}
{{- range $variable := (get $values $service).extraEnv -}}
{{- if hasPrefix "STEPWELL_" $variable.name -}}
{{- fail (printf "%s.extraEnv: %s is a setting: it belongs below %s.settings, in lower case and without the prefix" $service $variable.name $service) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $limits := default dict $values.worker.resources.limits -}}
{{- $devices := omit $limits "cpu" "memory" "ephemeral-storage" -}}
{{- if and (eq (get $values.worker.settings "device" | default "auto") "cuda") (empty $devices) (empty $values.worker.resources.claims) -}}
{{- fail "worker.settings.device cuda needs a GPU among worker.resources.limits, such as nvidia.com/gpu: 1, or worker.resources.claims" -}}
{{- end -}}
{{- $onePod := $values.tensorParallel.onePod -}}
{{- $numGpus := $onePod | ternary (int (include "stepwell.numRanks" .)) 1 -}}
{{- range $name, $count := $devices -}}
{{- if and (hasSuffix "/gpu" $name) (ne (int $count) $numGpus) -}}
{{- $why := $onePod | ternary "with tensorParallel.onePod the worker has all ranks of a replica" "each rank has a pod of its own, unless tensorParallel.onePod is set" -}}
{{- fail (printf "worker.resources.limits: %s must be %d, not %v, because a rank uses one GPU, and %s" $name $numGpus $count $why) -}}
{{- end -}}
{{- end -}}
{{- $update := $values.replicas.updateStrategy -}}
{{- if and (eq $update.type "OnDelete") (include "stepwell.hasLeaderWorkerSet" .) (gt (int (include "stepwell.numPods" .)) 1) -}}
{{- fail "replicas.updateStrategy.type OnDelete is for StatefulSets: a LeaderWorkerSet has RollingUpdate only" -}}
{{- end -}}
{{- if and (hasKey (default dict $update.rollingUpdate) "maxSurge") (eq (int (include "stepwell.numPods" .)) 1) -}}
{{- fail "replicas.updateStrategy.rollingUpdate.maxSurge is for LeaderWorkerSets: a StatefulSet has no such field" -}}
{{- end -}}
{{- if and $values.podDisruptionBudget.enabled (has (toString $values.podDisruptionBudget.maxUnavailable) (list "0" "0%")) -}}
{{- fail "podDisruptionBudget.maxUnavailable 0 would keep every node of the release from being emptied: give at least 1, or podDisruptionBudget.enabled: false" -}}
{{- end -}}
{{- range $route := list "httpRoute" "grpcRoute" -}}
{{- if and (get $values.gateway $route).enabled (empty (get $values.gateway $route).parentRefs) -}}
{{- fail (printf "gateway.%s.enabled needs gateway.%s.parentRefs: the Gateways whose listeners lead here" $route $route) -}}
{{- end -}}
{{- end -}}
{{- $service := $values.gateway.service -}}
{{- $ofNodes := list "httpNodePort" "grpcNodePort" -}}
{{- $ofBalancers := list "loadBalancerClass" "loadBalancerIP" "loadBalancerSourceRanges" "healthCheckNodePort" -}}
{{- range $name := dict "ClusterIP" (concat $ofNodes $ofBalancers) "NodePort" $ofBalancers "LoadBalancer" list | dig $service.type list -}}
{{- if get $service $name -}}
{{- fail (printf "gateway.service.%s needs another gateway.service.type than %s" $name $service.type) -}}
{{- end -}}
{{- end -}}
{{- $model := $values.model -}}
{{- if not (or $model.volume $model.claim.enabled $model.download.source) -}}
{{- fail "model.volume, model.claim.enabled or model.download.source must be given: a volume with the model's files such as {persistentVolumeClaim: {claimName: models}}, a claim that the chart creates, or a model to download such as hf://Qwen/Qwen3-0.6B" -}}
{{- end -}}
{{- if and $model.volume $model.claim.enabled -}}
{{- fail "model.volume and model.claim.enabled exclude each other" -}}
{{- end -}}
{{- $volume := default dict $model.volume -}}
{{- $readOnly := hasKey $volume "image" -}}
{{- range $kind := list "persistentVolumeClaim" "csi" "nfs" -}}
{{- $readOnly = or $readOnly (dig $kind "readOnly" false $volume) -}}
{{- end -}}
{{- if and $model.download.source $readOnly -}}
{{- fail "model.download.source needs a volume that can be written, but model.volume is read-only: remove readOnly, or use model.claim" -}}
{{- end -}}
{{- range $variable := $model.download.extraEnv -}}
{{- if or (hasPrefix "STEPWELL_" $variable.name) (has $variable.name (list "HF_ENDPOINT" "HF_TOKEN")) -}}
{{- fail (printf "model.download.extraEnv: %s has its own value below model.download" $variable.name) -}}
{{- end -}}
{{- end -}}
{{- if and $values.redis.existingSecret $values.redis.internal.enabled -}}
{{- fail "redis.existingSecret and redis.internal.enabled exclude each other" -}}
{{- end -}}
{{- if and (or (gt (int $values.replicas.count) 1) $scales) (not $redis) -}}
{{- fail "replicas.count above 1, and replicas.autoscaling, need redis.existingSecret or redis.internal.enabled: through Redis gateways find replicas and learn what each has cached" -}}
{{- end -}}
{{- if and (or $values.gateway.ofRelease $values.gateway.furtherModels) (not $redis) -}}
{{- fail "gateway.ofRelease and gateway.furtherModels need redis.existingSecret, the same Redis in all releases, or for the release with the gateways redis.internal.enabled: gateways find the replicas of other releases there" -}}
{{- end -}}
{{- if and $values.gateway.ofRelease $values.redis.internal.enabled -}}
{{- fail "gateway.ofRelease excludes redis.internal.enabled: replicas must use the Redis of the gateways" -}}
{{- end -}}
{{- if and $values.gateway.ofRelease $values.gateway.furtherModels -}}
{{- fail "gateway.ofRelease excludes gateway.furtherModels, which belongs to the release with the gateways" -}}
{{- end -}}
{{- $names := list $values.model.name -}}
{{- range $values.gateway.furtherModels -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail "gateway.furtherModels: each name must differ from the others and from model.name" -}}
{{- end -}}
{{- if and $values.gateway.apiKeys.inRedis (not $redis) -}}
{{- fail "gateway.apiKeys.inRedis needs redis.existingSecret or redis.internal.enabled" -}}
{{- end -}}
{{- if and $values.gateway.apiKeys.inRedis $values.redis.internal.enabled (not $values.redis.internal.persistence.enabled) -}}
{{- fail "gateway.apiKeys.inRedis with redis.internal.enabled needs redis.internal.persistence.enabled: otherwise all keys vanish with the pod" -}}
{{- end -}}
{{- if ne (empty $values.gateway.apiKeys.existingSecret) (and (empty $values.gateway.apiKeys.key) (empty $values.gateway.apiKeys.fileKey)) -}}
{{- fail "gateway.apiKeys.existingSecret needs gateway.apiKeys.key or gateway.apiKeys.fileKey, and they need it" -}}
{{- end -}}
{{- if and (eq $values.replicas.autoscaling.kind "keda") (empty $values.replicas.autoscaling.prometheusAddress) -}}
{{- fail "replicas.autoscaling.kind keda needs replicas.autoscaling.prometheusAddress" -}}
{{- end -}}
{{- if and (eq (int $values.replicas.autoscaling.minReplicas) 0) (eq $values.replicas.autoscaling.kind "hpa") -}}
{{- fail "replicas.autoscaling.minReplicas 0 needs kind keda or external: a HorizontalPodAutoscaler starts no first replica" -}}
{{- end -}}
{{- if and $scales (gt (int (include "stepwell.numPods" .)) 1) (not (include "stepwell.hasLeaderWorkerSet" .)) -}}
{{- fail "replicas.autoscaling with tensorParallel.size or pipelineParallel.size above 1 needs LeaderWorkerSets (tensorParallel.leaderWorkerSet)" -}}
{{- end -}}
{{- range $bounds := list $values.replicas.autoscaling $values.gateway.autoscaling -}}
{{- if gt (int $bounds.minReplicas) (int $bounds.maxReplicas) -}}
{{- fail "autoscaling.minReplicas must not be above autoscaling.maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- if $values.tls.internal.enabled -}}
{{- $given := $values.tls.internal.existingSecrets -}}
{{- if and (not $values.tls.internal.certManager.enabled) (or (empty $given.gateway) (empty $given.replica)) -}}
{{- fail "tls.internal.enabled needs tls.internal.certManager.enabled, or tls.internal.existingSecrets.gateway and .replica" -}}
{{- end -}}
{{- end -}}
{{- if $values.tls.public.enabled -}}
{{- $issued := $values.tls.public.certManager -}}
{{- if not (or $issued.enabled $values.tls.public.existingSecret) -}}
{{- fail "tls.public.enabled needs tls.public.certManager.enabled or tls.public.existingSecret" -}}
{{- end -}}
{{- if and $issued.enabled (empty $issued.issuerRef) -}}
{{- fail "tls.public.certManager.issuerRef must name an issuer that clients trust" -}}
{{- end -}}
{{- end -}}
{{- if $values.inferencePool.enabled -}}
{{- if empty $values.inferencePool.endpointPicker.name -}}
{{- fail "inferencePool.endpointPicker.name must name the service of an endpoint picker" -}}
{{- end -}}
{{- $ofReplicas := eq $values.inferencePool.target "replicas" -}}
{{- if and $ofReplicas (not $values.scheduler.vllmGrpc) -}}
{{- fail "inferencePool.target replicas needs scheduler.vllmGrpc" -}}
{{- end -}}
{{- if $ofReplicas | ternary $values.tls.internal.enabled $values.tls.public.enabled -}}
{{- fail "inferencePool.enabled excludes TLS of its target: an InferencePool has HTTP without TLS only" -}}
{{- end -}}
{{- end -}}
{{- end -}}
