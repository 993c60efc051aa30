package nft_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/svcproxy/svcproxy/internal/sys/nft"
	"github.com/svcproxy/svcproxy/internal/sys/nft/fake"
)

var (
	probed = nft.Table{Family: nft.IPv4, Name: "probe"}
	need   = []nft.Need{{What: "tables", Option: "CONFIG_NF_TABLES", Since: "3.13"}}
)

func TestProbeBearsAMomentOfTrouble(t *testing.T) {
	for _, trouble := range []error{unix.ENOBUFS, unix.EAGAIN, unix.EBUSY, unix.ENOMEM} {
		synctest.Test(t, func(t *testing.T) {
			left := 3
			k := &fake.Tables{Refuse: func([]nft.Op) error {
				if left--; left >= 0 {
					return trouble
				}
				return nil
			}}
			if err := nft.Probe(t.Context(), k, probed, need); err != nil {
				t.Errorf("%v three times, then none: %v", trouble, err)
			}
		})
	}
}

// What could not be tried is not missing.
func TestProbeTellsTroubleFromAbsence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &fake.Tables{}
		for _, c := range []struct {
			err     error
			missing bool
		}{{unix.ENOBUFS, false}, {unix.EOPNOTSUPP, true}} {
			k.Refuse = func([]nft.Op) error { return c.err }
			err := nft.Probe(t.Context(), k, probed, need)
			if !errors.Is(err, c.err) || strings.Contains(err.Error(), "missing") != c.missing {
				t.Errorf("%v: %v", c.err, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := nft.Probe(ctx, k, probed, need); err == nil || strings.Contains(err.Error(), "missing") {
			t.Errorf("canceled: %v", err)
		}
	})
}
