package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	kjson "sigs.k8s.io/json"
)

// wrongValues returns an error that names every field of a document whose value
// does not fit into target, with the value and what would fit. all, the decoder's
// own error, stops at the first and does not name it if it is a duration; it is
// returned if no field is found to blame.
func wrongValues(body []byte, target any, all error) error {
	var tree map[string]any
	if err := json.Unmarshal(body, &tree); err != nil {
		return all
	}
	var faults []string
	fits := func(v any) bool {
		text, err := json.Marshal(v)
		fresh := reflect.New(reflect.TypeOf(target).Elem()).Interface()
		return err == nil && kjson.UnmarshalCaseSensitivePreserveInts(text, fresh) == nil
	}
	// look judges one value; within builds a document that holds only that.
	var look func(path string, v any, within func(any) any)
	look = func(path string, v any, within func(any) any) {
		if fits(within(v)) {
			return
		}
		below, ok := v.(map[string]any)
		if !ok || !fits(within(map[string]any{})) {
			text, _ := json.Marshal(v) // it was JSON a moment ago
			faults = append(faults, fmt.Sprintf("%s: %s cannot be used; give %s", path, text,
				wanted(func(v any) bool { return fits(within(v)) })))
			return
		}
		for _, name := range slices.Sorted(maps.Keys(below)) {
			look(strings.TrimPrefix(path+"."+name, "."), below[name], func(v any) any { return within(map[string]any{name: v}) })
		}
	}
	look("", tree, func(v any) any { return v })
	if len(faults) == 0 {
		return all
	}
	return errors.New(strings.Join(faults, "; "))
}

// wanted says what a field takes, found out by trying.
func wanted(fits func(any) bool) string {
	switch {
	case fits(true):
		return "true or false, without quotes"
	case fits("x"):
		return "text, in quotes if it looks like something else"
	case fits("1s"):
		return "a duration like 30s or 1h30m"
	case fits(1):
		return "a whole number that is not too large"
	case fits([]any{}):
		return `a list, like ["a", "b"]`
	case fits(map[string]any{}):
		return "fields with values"
	}
	return "another value, see the documentation"
}
