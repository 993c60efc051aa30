module github.com/svcproxy/svcproxy

go 1.26.0

require (
	github.com/fsnotify/fsnotify v1.10.1 // manifests and the configuration file are followed live
	github.com/google/go-cmp v0.7.0 // tests: readable differences
	github.com/google/nftables v0.3.0 // tests: rules of the lab's hosts
	github.com/mdlayher/genetlink v1.4.0 // generic netlink, over which ip_vs is spoken to
	github.com/mdlayher/netlink v1.11.2 // netlink sockets: nf_tables, connection tracking, notifications
	github.com/prometheus/client_golang v1.24.0 // metrics
	github.com/rogpeppe/go-internal v1.14.1 // tests: scripts and their archives, the language under scenarios
	github.com/spf13/cobra v1.10.2 // commands
	github.com/spf13/pflag v1.0.10 // flags as kube-proxy has them
	github.com/ti-mo/conntrack v0.6.0 // tests: list flows (it cannot have the kernel filter a dump by destination)
	github.com/vishvananda/netlink v1.3.1 // addresses, links and routes of the host; namespaces of tests
	golang.org/x/sys v0.47.0 // system calls
	golang.org/x/time v0.15.0 // limits of repairs and events
	k8s.io/api v0.37.2 // the objects that are read
	k8s.io/apimachinery v0.37.2 // their encodings and meta data
	k8s.io/client-go v0.37.2 // transport, authentication and kubeconfig of the API source
	k8s.io/component-base v0.37.2 // types within kube-proxy's configuration
	k8s.io/klog/v2 v2.140.0 // client-go logs with it; bridged to slog
	k8s.io/kube-proxy v0.37.2 // the types of its configuration file
	k8s.io/utils v0.0.0-20260626114624-be93311217bd // addresses with leading zeros, as the API takes them
	sigs.k8s.io/json v0.0.0-20250730193827-2d320260d730 // strict decoding that names the field
	sigs.k8s.io/yaml v1.6.0 // YAML as Kubernetes reads it
)

require (
	github.com/beorn7/perks v1.0.1 // indirect
	github.com/blang/semver/v4 v4.0.0 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/davecgh/go-spew v1.1.2-0.20180830191138-d8f796af33cc // indirect
	github.com/fxamacker/cbor/v2 v2.9.1 // indirect
	github.com/go-logr/logr v1.4.3 // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/json-iterator/go v1.1.12 // indirect
	github.com/mdlayher/socket v0.6.0 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.3-0.20250322232337-35a7c28c31ee // indirect
	github.com/munnerz/goautoneg v0.0.0-20191010083416-a7dc8b61c822 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	github.com/pmezard/go-difflib v1.0.1-0.20181226105442-5d4384ee4fb2 // indirect
	github.com/prometheus/client_model v0.6.2 // indirect
	github.com/prometheus/common v0.70.0 // indirect
	github.com/prometheus/procfs v0.21.1 // indirect
	github.com/ti-mo/netfilter v0.5.3 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	go.opentelemetry.io/otel v1.44.0 // indirect
	go.opentelemetry.io/otel/trace v1.44.0 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	golang.org/x/net v0.57.0 // indirect
	golang.org/x/oauth2 v0.36.0 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/term v0.45.0 // indirect
	golang.org/x/text v0.40.0 // indirect
	golang.org/x/tools v0.47.0 // indirect
	google.golang.org/protobuf v1.36.12-0.20260120151049-f2248ac996af // indirect
	gopkg.in/inf.v0 v0.9.1 // indirect
	k8s.io/kube-openapi v0.0.0-20260721132016-d427ff9ee9ad // indirect
	sigs.k8s.io/randfill v1.0.0 // indirect
	sigs.k8s.io/structured-merge-diff/v6 v6.4.2 // indirect
)
