{{- define "gradexporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release name alone where it already says gradexporter. 50 characters leave room for a suffix. */}}
{{- define "gradexporter.fullname" -}}
{{- $name := include "gradexporter.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels of every object; call with (dict "root" $ "additional" LABELS). The additional ones win. */}}
{{- define "gradexporter.labels" -}}
{{- $labels := dict
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" (include "gradexporter.name" .root)
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
}}
{{- toYaml (mergeOverwrite $labels (deepCopy .root.Values.commonLabels) (deepCopy .additional)) }}
{{- end }}

{{/* The pods to scrape. A default in values.yaml would be merged into the user's selector instead of replaced. */}}
{{- define "gradexporter.selector" -}}
{{- $scraped := dict "matchLabels" (dict "gradexporter.io/scrape" "true") }}
{{- toYaml (.Values.podMonitor.selector | default $scraped) }}
{{- end }}

{{/* One endpoint of the PodMonitor; call with (dict "monitor" .Values.podMonitor "shared" BOOL). */}}
{{- define "gradexporter.endpoint" -}}
{{- $monitor := .monitor }}
{{- if not .shared }}
port: {{ $monitor.port }}
{{- end }}
path: {{ $monitor.path }}
interval: {{ $monitor.interval }}
{{- with $monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
scheme: {{ $monitor.scheme }}
{{- with $monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
honorLabels: {{ $monitor.honorLabels }}
filterRunning: {{ $monitor.filterRunning }}
{{- if or .shared $monitor.relabelings }}
relabelings:
  {{- if .shared }}
  - action: keep
    sourceLabels: [__meta_kubernetes_pod_container_port_name]
    regex: {{ $monitor.port }}-[0-9]+
  - sourceLabels: [__meta_kubernetes_pod_container_port_name]
    targetLabel: endpoint
  {{- end }}
  {{- with $monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
