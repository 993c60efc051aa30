package relaybench

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// ticks is the kernel's USER_HZ on every architecture of Linux that Go runs on.
const ticks = 100

// cpu returns the seconds of CPU that a process has used; none: 0.
func (p *process) cpu() (float64, error) {
	if p == nil {
		return 0, nil
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	if len(f) < 13 {
		return 0, fmt.Errorf("unexpected process state %q", b)
	}
	user, err := strconv.Atoi(f[11])
	if err != nil {
		return 0, err
	}
	system, err := strconv.Atoi(f[12])
	return float64(user+system) / ticks, err
}

// rss returns the resident memory of a process in KiB; none: 0.
func (p *process) rss() (float64, error) {
	if p == nil {
		return 0, nil
	}
	return field(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid), "VmRSS:")
}

// ofConnections are the caches from which the kernel takes what a TCP connection needs,
// pipes of relays included. Others grow with what else the system does: reading
// /proc/PID/fd leaves an inode for each descriptor.
var ofConnections = []string{
	"TCP", "request_sock_TCP", "tw_sock_TCP", "sock_inode_cache", "filp", "eventpoll_epi", "eventpoll_pwq", "ep_head",
	"skbuff_head_cache", "skbuff_small_head", "skbuff_fclone_cache", "kmalloc-cg-192", "kmalloc-cg-1k",
}

// slabKiB returns what the kernel has allocated for connections.
func slabKiB() (float64, error) {
	b, err := os.ReadFile("/proc/slabinfo")
	if err != nil {
		return 0, err
	}
	total := 0.0
	for line := range strings.Lines(string(b)) { // name, objects in use, objects, size of each
		parts := strings.Fields(line)
		if len(parts) < 4 || !slices.Contains(ofConnections, parts[0]) {
			continue
		}
		used, err := strconv.ParseFloat(parts[1], 64)
		if err != nil {
			return 0, err
		}
		size, err := strconv.ParseFloat(parts[3], 64)
		if err != nil {
			return 0, err
		}
		total += used * size / 1024
	}
	return total, nil
}

// field returns the number that follows a name in a file of /proc.
func field(file, name string) (float64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if parts := strings.Fields(s.Text()); len(parts) >= 2 && parts[0] == name {
			return strconv.ParseFloat(parts[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, name)
}
