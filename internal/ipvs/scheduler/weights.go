package scheduler

import "github.com/svcproxy/svcproxy/internal/plan"

// Slots of the tables by which the kernel's schedulers sh and mh look up a hash, unless
// it was built with other sizes (IP_VS_SH_TAB_SIZE and IP_VS_MH_TAB_SIZE).
const (
	slotsOfSH = 256
	slotsOfMH = 4093
)

// Weights returns the weights of endpoints for a scheduler. They are the endpoints' own
// but with sh and mh, which give each real server as many slots in a row as its weight
// says and begin anew until the table is full: of great weights the first ones would take
// all. There they are made smaller, as near to their ratios as slots allow; what has
// some weight keeps some.
func Weights(scheduler string, eps []plan.Endpoint) []uint32 {
	out := make([]uint32, len(eps))
	sum, divisor := uint32(0), uint32(0)
	for i := range eps {
		out[i] = uint32(eps[i].Weight)
		sum += out[i]
		divisor = gcd(out[i], divisor)
	}
	slots := map[string]uint32{"sh": slotsOfSH, "mh": slotsOfMH}[scheduler]
	if slots == 0 || divisor == 0 {
		return out
	}
	sum /= divisor
	for i, w := range out {
		if w /= divisor; w > 0 && sum > slots {
			w = max(1, uint32((uint64(w)*uint64(slots)+uint64(sum)/2)/uint64(sum)))
		}
		out[i] = w
	}
	return out
}

func gcd(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
