package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// ticks is the kernel's USER_HZ, which is 100 on every architecture of Linux that
// Go runs on.
const ticks = 100

// cpuOf returns the seconds of CPU, user and system, that a process has used,
// together with those of its children that it has waited for, such as
// iptables-restore: fields 14 to 17 of /proc/PID/stat, see proc(5).
func cpuOf(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseCPU(string(b))
}

func parseCPU(stat string) (float64, error) {
	// The name, in parentheses, may hold anything.
	end := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[end+1:])
	if end < 0 || len(fields) < 15 {
		return 0, fmt.Errorf("unexpected process state %q", stat)
	}
	sum := 0
	for _, f := range fields[11:15] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, fmt.Errorf("unexpected process state %q: %w", stat, err)
		}
		sum += n
	}
	return float64(sum) / ticks, nil
}

// memoryOf returns the resident memory of a process and its highest value so far,
// in MiB.
func memoryOf(pid int) (rss, peak float64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	rss, peak = parseMemory(string(b))
	return rss, peak, nil
}

func parseMemory(status string) (rss, peak float64) {
	for line := range strings.Lines(status) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kib, err := strconv.ParseFloat(f[1], 64)
		if err != nil {
			continue
		}
		switch f[0] {
		case "VmRSS:":
			rss = kib / 1024
		case "VmHWM:":
			peak = kib / 1024
		}
	}
	return rss, peak
}

// rest waits at least for a time, and until the program has used at most a tick
// of CPU in a second; a program that never rests is not waited for longer than a
// minute. It returns the CPU used so far.
func rest(ctx context.Context, pr *program, least time.Duration) (float64, error) {
	if err := pause(ctx, pr, least); err != nil {
		return 0, err
	}
	last, err := cpuOf(pr.cmd.Process.Pid)
	for range 60 {
		if err != nil {
			return 0, err
		}
		if err := pause(ctx, pr, time.Second); err != nil {
			return 0, err
		}
		var now float64
		now, err = cpuOf(pr.cmd.Process.Pid)
		if err == nil && now-last <= 1.0/ticks {
			return now, nil
		}
		last = now
	}
	return last, err
}

// pause waits for a time unless the program or the run ends.
func pause(ctx context.Context, pr *program, d time.Duration) error {
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-pr.ended:
		case <-ctx.Done():
		}
	}
	return pr.alive(ctx)
}
