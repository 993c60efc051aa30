// Package cluster holds the outermost ring of tests: the real binary on a node out
// of network namespaces, behind a real etcd and kube-apiserver. It shows what a
// stand-in for the API server cannot: that the API server's own defaults, its
// watch-list, its protobuf and its access rules are enough for us, and that a
// restart of it goes unnoticed by packets.
//
// The tests have the build tag cluster and need root, and the paths of the two
// programs in SVCPROXY_ETCD and SVCPROXY_KUBE_APISERVER; "make test-cluster" builds
// them and sets both.
package cluster
