// Package relay is a layer-4 load balancer in user space: it accepts TCP
// connections and UDP flows on listening sockets, chooses an endpoint of the
// Service they are for, and moves the bytes. It knows neither netfilter nor
// Kubernetes: how packets get to its sockets is the caller's affair, and which
// Service a socket stands for is said by a [Router].
//
// A few event loops own all sockets. Each waits for its own epoll set, so a connection
// costs two descriptors and a few hundred bytes while nothing happens on it: no
// goroutine, no buffer, no pipe. Small amounts are read and written through the loop's
// one buffer; streams are moved with splice(2) through pipes that are borrowed as long
// as data flows. UDP is read and written in batches (recvmmsg, sendmmsg, UDP_GRO and
// UDP_SEGMENT).
//
// What is promised: a half-close is passed on as a half-close and a reset as a
// reset; data that a client sent while endpoints are tried is not lost; a reader
// that is slow holds back its own sender only; no limit ends the process: whatever
// is refused is counted by its [Reason].
//
// Limits: Linux only. Urgent data is passed on inline as TCP sockets deliver it.
// A UDP flow is a client's address and port, and always served by the same loop. SCTP
// is not relayed.
package relay
