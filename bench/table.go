package main

import (
	"fmt"
	"slices"
	"strings"
)

// measure is one line of the table.
type measure struct {
	name  string
	value func(result) float64
}

func measures() []measure {
	return []measure{
		{"full sync, s", func(r result) float64 { return r.FullSync }},
		{"CPU until full sync, s", func(r result) float64 { return r.SyncCPU }},
		{"CPU until idle, s", func(r result) float64 { return r.IdleCPU }},
		{"RSS, MiB", func(r result) float64 { return r.RSS }},
		{"peak RSS, MiB", func(r result) float64 { return r.Peak }},
		{"one change p50, ms", func(r result) float64 { return r.ChangeP50 }},
		{"one change max, ms", func(r result) float64 { return r.ChangeMax }},
		{"CPU per change, ms", func(r result) float64 { return r.ChangeCPU }},
		{"connect p50, µs", func(r result) float64 { return r.ConnectP50 }},
		{"connect p99, µs", func(r result) float64 { return r.ConnectP99 }},
		{"connections per s (more is better)", func(r result) float64 { return r.ConnectRate }},
		{"failed connections", func(r result) float64 { return r.Failures }},
		{"CPU under churn, %", func(r result) float64 { return r.ChurnCPU }},
		{"one change at its end, ms", func(r result) float64 { return r.ChurnChange }},
		{"RSS after churn, MiB", func(r result) float64 { return r.RSSAfter }},
		{"peak RSS after churn, MiB", func(r result) float64 { return r.PeakAfter }},
	}
}

// table returns the medians, in Markdown, and next to each other program the
// ratio of the first to it.
func (p *plan) table(results []result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s mode%s, %d endpoints each, medians of %d rounds\n\n", p.mode, p.variant(), p.endpoints, p.rounds)
	b.WriteString("| Services | measure |")
	for i, s := range p.subjects {
		fmt.Fprintf(&b, " %s |", s.name)
		if i > 0 {
			fmt.Fprintf(&b, " %s / %s |", p.subjects[0].name, s.name)
		}
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", 2*len(p.subjects)-1) + "\n")
	for _, size := range p.services {
		for _, m := range measures() {
			fmt.Fprintf(&b, "| %d | %s |", size, m.name)
			first := 0.0
			for i, s := range p.subjects {
				v := median(results, s.name, size, m.value)
				fmt.Fprintf(&b, " %s |", number(v))
				switch {
				case i == 0:
					first = v
				case v == 0:
					b.WriteString(" |")
				default:
					fmt.Fprintf(&b, " %.2f |", first/v)
				}
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

func (p *plan) variant() string {
	if p.mode != "iptables" || p.iptables == "" {
		return ""
	}
	return " (iptables-" + p.iptables + ")"
}

func median(results []result, name string, size int, value func(result) float64) float64 {
	var d []float64
	for _, r := range results {
		if r.Name == name && r.Services == size {
			d = append(d, value(r))
		}
	}
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return (d[len(d)/2] + d[(len(d)-1)/2]) / 2
}

// number prints three significant digits, more before the point.
func number(v float64) string {
	switch {
	case v >= 100 || v == 0:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}
