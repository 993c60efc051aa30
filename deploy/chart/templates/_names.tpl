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
