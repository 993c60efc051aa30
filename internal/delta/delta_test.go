package delta

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

func sorted(t *testing.T, tr *Tracker[string, int]) (writes, deletes []string) {
	t.Helper()
	return slices.Sorted(tr.Writes()), slices.Sorted(tr.Deletes())
}

func TestWhatDiffers(t *testing.T) {
	tr := New[string, int]()
	tr.Have("stale", 1)
	tr.Have("same", 2)
	tr.Have("other", 3)
	if tr.Want("same", 2) {
		t.Error("Want of what is there reports work")
	}
	if !tr.Want("other", 4) || !tr.Want("new", 5) {
		t.Error("Want of something else reports no work")
	}
	writes, deletes := sorted(t, tr)
	if want := []string{"new", "other"}; !slices.Equal(writes, want) {
		t.Errorf("writes: have %v, want %v", writes, want)
	}
	if want := []string{"stale"}; !slices.Equal(deletes, want) {
		t.Errorf("deletes: have %v, want %v", deletes, want)
	}
	for _, k := range append(writes, deletes...) {
		tr.Done(k)
	}
	if !tr.InSync() || tr.Len() != 3 {
		t.Errorf("after all was done: in sync %v, %d keys, want true, 3", tr.InSync(), tr.Len())
	}
	tr.Unwant("same")
	tr.Want("same", 2)
	if tr.Pending("same") {
		t.Error("a key that is back where it was is pending")
	}
}

func TestForget(t *testing.T) {
	tr := New[string, int]()
	tr.Want("a", 1)
	tr.Done("a")
	tr.Have("b", 2)
	tr.Forget()
	writes, deletes := sorted(t, tr)
	if !slices.Equal(writes, []string{"a"}) || len(deletes) != 0 {
		t.Errorf("after Forget: writes %v, deletes %v", writes, deletes)
	}
	tr.Have("a", 1)
	if !tr.InSync() {
		t.Error("reading back what is wanted leaves work")
	}
	tr.UnwantAll()
	if _, deletes = sorted(t, tr); !slices.Equal(deletes, []string{"a"}) {
		t.Errorf("after UnwantAll: deletes %v", deletes)
	}
}

// Whatever order things are said in, carrying out what differs makes both sides
// equal, against two plain maps as the reference.
func TestRandomWalk(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	tr := New[int, int]()
	want, have := map[int]int{}, map[int]int{}
	for range 20_000 {
		k, v := rng.IntN(40), rng.IntN(4)
		switch rng.IntN(5) {
		case 0, 1:
			tr.Want(k, v)
			want[k] = v
		case 2:
			tr.Unwant(k)
			delete(want, k)
		case 3:
			tr.Have(k, v)
			have[k] = v
		case 4:
			tr.Gone(k)
			delete(have, k)
		}
		if rng.IntN(50) != 0 {
			continue
		}
		for _, k := range slices.Collect(tr.Writes()) {
			have[k] = want[k]
			tr.Done(k)
		}
		for _, k := range slices.Collect(tr.Deletes()) {
			delete(have, k)
			tr.Done(k)
		}
		if !maps.Equal(want, have) || !tr.InSync() || !maps.Equal(maps.Collect(tr.All()), want) {
			t.Fatalf("carrying out the difference gives %v, want %v", have, want)
		}
	}
}
