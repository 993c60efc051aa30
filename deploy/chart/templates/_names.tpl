{{- define "svcproxy.labels" -}}
app.kubernetes.io/name: svcproxy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "svcproxy.selector" -}}
app.kubernetes.io/name: svcproxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "svcproxy.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}
{{- define "svcproxy.config" -}}
{{ toYaml .Values.config }}
---
{{ toYaml .Values.ownConfig }}
{{- end }}
{{- /* Where a server listens: IP:port, an IP alone, or nothing; as JSON {ip, port}. */ -}}
{{- define "svcproxy.server" -}}
{{- $ip := regexReplaceAll ":[0-9]+$" .address "" -}}
{{- $port := trimPrefix ":" (regexFind ":[0-9]+$" .address) -}}
{{- if or (eq .address "") (and (not (hasPrefix "[" .address)) (gt (len (splitList ":" .address)) 2)) -}}
{{- $ip = .address -}}
{{- $port = "" -}}
{{- end -}}
{{- dict "ip" (trimAll "[]" $ip | default .ip) "port" (int ($port | default .port)) | toJson -}}
{{- end }}
{{- define "svcproxy.healthz" -}}
{{- include "svcproxy.server" (dict "address" (.Values.config.healthzBindAddress | default "") "ip" "0.0.0.0" "port" 10256) -}}
{{- end }}
{{- define "svcproxy.metrics" -}}
{{- include "svcproxy.server" (dict "address" (.Values.config.metricsBindAddress | default "") "ip" "127.0.0.1" "port" 10249) -}}
{{- end }}
{{- /* What kubelet, on the same host, asks: host is left out where the node's address will do. */ -}}
{{- define "svcproxy.probe" -}}
{{- $server := include "svcproxy.healthz" .root | fromJson -}}
{path: {{ .path }}, port: {{ int $server.port }}{{ if not (has $server.ip (list "0.0.0.0" "::")) }}, host: {{ $server.ip | quote }}{{ end }}}
{{- end }}
