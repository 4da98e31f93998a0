{{/* The image of a container. */}}
{{- define "crust-csi.image" -}}
image: {{ printf "%s:%s" .repository .tag | quote }}
{{- with .pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* Which nodes the pods of a DaemonSet are on, and how they get there. */}}
{{- define "crust-csi.onNodes" -}}
{{- with .Values.nodes.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodes.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodes.nodeAffinity }}
affinity:
  nodeAffinity: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .Values.nodes.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The same, for what is for amd64 only. */}}
{{- define "crust-csi.onAMD64" -}}
{{- $selector := merge (dict "kubernetes.io/arch" "amd64") .Values.nodes.nodeSelector }}
{{- $nodes := merge (dict "nodeSelector" $selector) .Values.nodes }}
{{- include "crust-csi.onNodes" (dict "Values" (dict "nodes" $nodes "imagePullSecrets" .Values.imagePullSecrets)) }}
{{- end }}

{{/* Kubernetes' default is one node after the other. No surge: a node has one driver. */}}
{{- define "crust-csi.updateStrategy" -}}
{{- if ne (toString .Values.nodes.maxUnavailable) "1" }}
updateStrategy:
  type: RollingUpdate
  rollingUpdate: {maxUnavailable: {{ .Values.nodes.maxUnavailable }}}
{{- end }}
{{- end }}

{{/* Flags of csi-node, crustd and crust-agent, where the value is not their own default. */}}
{{- define "crust-csi.logFlags" -}}
{{- if ne .Values.log.format "text" }}
- --log-format={{ .Values.log.format }}
{{- end }}
{{- if ne (int .Values.log.verbosity) 2 }}
- -v={{ .Values.log.verbosity }}
{{- end }}
{{- end }}

{{/* Environment of csi-node, crustd and crust-agent. The node's address comes first: what
follows may name it. */}}
{{- define "crust-csi.tracesEnv" -}}
{{- if .Values.traces }}
- {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
{{- if not .Values.traces.OTEL_RESOURCE_ATTRIBUTES }}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: k8s.node.name=$(NODE_NAME)}
{{- end }}
{{- range $name, $value := .Values.traces }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* What csi-node's configuration file says: pools and devices, and those of nodes with certain labels. */}}
{{- define "crust-csi.nodeConfig" -}}
{{- $pools := list }}
{{- range .Values.pools }}
{{- $pools = append $pools (omit . "disk") }}
{{- end }}
{{- $config := dict "apiVersion" "csi.crust.dev/v1alpha1" "kind" "NodeConfig" "pools" $pools "nodes" .Values.nodePools.nodes }}
{{- with .Values.allowDevices }}
{{- $_ := set $config "allowDevices" . }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{- define "crust-csi.sidecarFlags" -}}
{{- if .Values.log.sidecarVerbosity }}
- --v={{ .Values.log.sidecarVerbosity }}
{{- end }}
{{- end }}

{{/* A token for the container that needs one, and for no other of its pod. */}}
{{- define "crust-csi.tokenVolume" -}}
- name: token
  projected:
    sources:
      - serviceAccountToken: {path: token}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{/* What external sidecars and the resizer are: not root, and in the group that may connect. */}}
{{- define "crust-csi.sidecarPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
supplementalGroups: [285700]
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "crust-csi.sidecarContainer" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
  # spc_t: the socket is the host's, where SELinux is on.
  seLinuxOptions: {type: spc_t}
volumeMounts:
  - {name: socket, mountPath: /csi}
  - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{- define "crust-csi.storageClass" -}}
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: {{ .name | quote }}
  {{- if .default }}
  annotations: {storageclass.kubernetes.io/is-default-class: "true"}
  {{- end }}
provisioner: csi.crust.dev
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: {{ dig "allowVolumeExpansion" true . }}
reclaimPolicy: {{ .reclaimPolicy | default "Delete" }}
{{- with .mountOptions }}
mountOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .parameters }}
parameters:
  {{- range $key, $value := . }}
  {{ $key }}: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
A file of deploy/kubernetes, which is a link below files/ and has nothing to set but
the namespace: it is in metadata, in the subjects of bindings, and in the names of users.
*/}}
{{- define "crust-csi.file" -}}
{{- $namespace := .root.Release.Namespace }}
{{- .root.Files.Get .path
  | replace "namespace: crust-csi" (printf "namespace: %s" (quote $namespace))
  | replace "system:serviceaccount:crust-csi:" (printf "system:serviceaccount:%s:" $namespace) }}
{{- end }}
