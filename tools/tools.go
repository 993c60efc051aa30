//go:build tools

// Package tools pins the programs that the tests build from source: the real
// control plane in front of the binary, and upstream's kube-proxy to compare with.
package tools

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-proxy"
)
