package scheduler

import (
	"slices"
	"testing"

	"github.com/svcproxy/svcproxy/internal/plan"
)

func TestWeights(t *testing.T) {
	for _, c := range []struct {
		scheduler string
		have      []uint16
		want      []uint32
	}{
		{"wrr", []uint16{60000, 60000}, []uint32{60000, 60000}},
		{"sh", []uint16{1, 2, 5}, []uint32{1, 2, 5}},
		{"sh", []uint16{60000, 60000}, []uint32{1, 1}},
		{"sh", []uint16{100, 0, 100}, []uint32{1, 0, 1}},
		{"sh", []uint16{60000, 59999}, []uint32{128, 128}},
		{"sh", []uint16{65535, 1}, []uint32{256, 1}},
		{"mh", []uint16{60000, 59999}, []uint32{2047, 2046}},
		{"mh", []uint16{300, 299}, []uint32{300, 299}},
		{"sh", []uint16{0, 0}, []uint32{0, 0}},
		{"sh", nil, []uint32{}},
	} {
		eps := make([]plan.Endpoint, len(c.have))
		for i, w := range c.have {
			eps[i].Weight = w
		}
		if have := Weights(c.scheduler, eps); !slices.Equal(have, c.want) {
			t.Errorf("%s %d: have %d, want %d", c.scheduler, c.have, have, c.want)
		}
	}
}
