{{/* Start of all names, at most 26 characters, so that the longest (a StatefulSet's, 26 + 6 + 20) leaves room in 63 for a
pod's suffix. A release whose name does not fit gets a digest of it, or two of them could share a name. */}}
{{- define "trident.prefix" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[^a-z]" $name -}}{{- $name = printf "t-%s" $name -}}{{- end -}}
{{- if or (ne $name .Release.Name) (gt (len $name) 26) -}}
{{- printf "%s-%s" ($name | trunc 17 | trimSuffix "-") (sha256sum .Release.Name | trunc 8) -}}
{{- else -}}{{- $name -}}{{- end -}}
{{- end -}}

{{/* Labels that select the pods of (dict "root" $ "component" NAME). */}}
{{- define "trident.selector" -}}
app.kubernetes.io/name: trident
app.kubernetes.io/instance: {{ include "trident.prefix" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
trident/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "trident.labels" -}}
{{ include "trident.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* replicas of (dict "root" $ "kind" KIND "name" NAME), a workload that KEDA or an HPA scales: as many as it has now.
Where an earlier version of the release had replicas and this one had none, Kubernetes would set 1. */}}
{{- define "trident.liveReplicas" -}}
{{- with lookup "apps/v1" .kind .root.Release.Namespace .name -}}
replicas: {{ int .spec.replicas }}
{{- end -}}
{{- end -}}

{{/* A pool with the defaults that it does not set, as JSON. */}}
{{- define "trident.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy .pool) | toJson -}}
{{- end -}}

{{- define "trident.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "trident.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Environment of (dict "own" DICT "values" VALUES "where" PATH): what the chart sets, what the values add, Secrets. */}}
{{- define "trident.env" -}}
{{- $own := .own -}}{{- $where := .where -}}{{- $seen := deepCopy .own -}}
{{- range $name, $value := .own }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- range $name, $value := .values.env }}
{{- if hasKey $own $name }}{{ fail (printf "%s.env.%s: the chart sets it from its other values, so it must not be given" $where $name) }}{{ end }}
{{- $_ := set $seen $name true }}
- {name: {{ $name }}, value: {{ (kindIs "float64" $value | ternary ($value | toJson) ($value | toString)) | quote }}}
{{- end }}
{{- range .values.secretEnv }}
{{- if hasKey $seen .name }}{{ fail (printf "%s.secretEnv: %s must be given once, and not be set by the chart" $where .name) }}{{ end }}
{{- $_ := set $seen .name true }}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}
{{- end -}}

{{/* The configuration file of the gateways: the one that is given, or each pool as the model that it names. */}}
{{- define "trident.gatewayConfig" -}}
{{- if .Values.gateway.config }}{{ .Values.gateway.config }}{{ else -}}
{{- $models := dict -}}
[pools]
{{- range .Values.pools }}
{{- $pool := include "trident.pool" (dict "root" $ "pool" .) | fromJson }}
{{- $model := $pool.model | default .name }}
{{- $_ := set $models $model (append (get $models $model | default list) .name) }}
{{ .name }} = { weight = 1.0{{ if and $.Values.keda.enabled (eq 0 (int $pool.replicas.min)) }}, scale_to_zero = true{{ end }} }
{{- end }}
{{- range $model, $pools := $models }}
[models.{{ $model | toJson }}]
pools = {{ $pools | toJson }}
{{- end }}
{{ end }}
{{- end -}}

{{/* What the schema cannot say, because it spans values. */}}
{{- define "trident.check" -}}
{{- $longest := int .Values.gateway.requestTimeoutSeconds -}}
{{- with .Values.gateway -}}
{{- if le (int .drainSeconds) $longest }}{{ fail (printf "gateway.drainSeconds: must be more than gateway.requestTimeoutSeconds (%d), or streams are cut off, got %d" $longest (int .drainSeconds)) }}{{ end -}}
{{- if lt (int .autoscaling.max) (int .autoscaling.min) }}{{ fail (printf "gateway.autoscaling.max: must be at least gateway.autoscaling.min (%d), got %d" (int .autoscaling.min) (int .autoscaling.max)) }}{{ end -}}
{{- if and .config .configSecret }}{{ fail "gateway.config: must be empty where gateway.configSecret is set" }}{{ end -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.proxies) }}{{ fail "networkPolicy.proxies: must name Envoy's pods where inferencePool.enabled is true, got none" }}{{ end -}}
{{- $names := dict -}}
{{- range .Values.pools -}}
{{- $pool := include "trident.pool" (dict "root" $ "pool" .) | fromJson -}}
{{- $at := printf "pools: %s" .name -}}
{{- if hasKey $names .name }}{{ fail (printf "%s: name must be unique, got it twice" $at) }}{{ end -}}
{{- $_ := set $names .name true -}}
{{- if lt (int $pool.replicas.max) (int $pool.replicas.min) }}{{ fail (printf "%s: replicas.max must be at least replicas.min (%d), got %d" $at (int $pool.replicas.min) (int $pool.replicas.max)) }}{{ end -}}
{{- if and $.Values.keda.enabled (lt (int $pool.replicas.max) 1) }}{{ fail (printf "%s: replicas.max must be at least 1 with keda.enabled, got 0" $at) }}{{ end -}}
{{- range $rule, $_ := $pool.scaling }}{{ if has $rule (list "min_replicas" "max_replicas") }}{{ fail (printf "%s: scaling.%s: replicas sets it, so it must not be given" $at $rule) }}{{ end }}{{ end -}}
{{- /* 0.2 and 0.4 are the law's. */ -}}
{{- $least := dig "least_headroom" 0.2 $pool.scaling | float64 }}{{ $most := dig "most_headroom" 0.4 $pool.scaling | float64 -}}
{{- if gt $least $most }}{{ fail (printf "%s: scaling.most_headroom must be at least scaling.least_headroom (%v), got %v" $at $least $most) }}{{ end -}}
{{- $hour := dig "replica_hour" 0.0 $pool.scaling | float64 }}{{ $cost := dig "cost_per_hour" 0.0 $pool.scaling | float64 }}{{ $floor := max 1 (int $pool.replicas.min) -}}
{{- if and $cost (not $hour) }}{{ fail (printf "%s: scaling.replica_hour must be set with scaling.cost_per_hour, got 0" $at) }}{{ end -}}
{{- if and $cost (lt (addf (divf $cost $hour) 1e-9) (float64 $floor)) }}{{ fail (printf "%s: scaling.cost_per_hour must pay for %d of scaling.replica_hour, got %v" $at $floor $cost) }}{{ end -}}
{{- if le (int $pool.drainSeconds) $longest }}{{ fail (printf "%s: drainSeconds must be more than gateway.requestTimeoutSeconds (%d), or streams are cut off, got %d" $at $longest (int $pool.drainSeconds)) }}{{ end -}}
{{- if and (eq $pool.kind "trtllm") (lt (int $pool.gpus) 1) }}{{ fail (printf "%s: gpus must be at least 1 for kind trtllm, got 0" $at) }}{{ end -}}
{{- if and (eq $pool.kind "cpu") (gt (int $pool.gpus) 0) }}{{ fail (printf "%s: gpus must be 0 for kind cpu, got %d" $at (int $pool.gpus)) }}{{ end -}}
{{- end -}}
{{- end -}}
