package plan

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Defaults and limits of a [HealthCheck].
const (
	defaultCheckInterval = 5 * time.Second
	defaultCheckTimeout  = time.Second
	defaultCheckRise     = 2
	defaultCheckFall     = 3

	leastCheckInterval = 100 * time.Millisecond
	mostCheckInterval  = time.Hour
	leastCheckTimeout  = 10 * time.Millisecond
	mostCheckTimeout   = 10 * time.Second // a probe under way holds one of a few hundred places
	mostCheckPath      = 256              // bytes
	mostCheckRise      = 100
)

// ParseHealthCheck reads "off", or "tcp" or "http" followed by ",key=value" of the
// keys interval, timeout, rise, fall and port, and with http path and code. Commas
// cannot be part of a path but as "%2C". What is left out has its default. The
// error says what is wrong and what is allowed.
func ParseHealthCheck(s string) (HealthCheck, error) {
	method, settings, more := strings.Cut(s, ",")
	h := HealthCheck{
		Interval: defaultCheckInterval, Timeout: defaultCheckTimeout, Rise: defaultCheckRise, Fall: defaultCheckFall,
	}
	switch strings.TrimSpace(method) {
	case "off":
		if more {
			return HealthCheck{}, fmt.Errorf("%q is not allowed behind off; remove it", settings)
		}
		return HealthCheck{}, nil
	case "tcp":
		h.Method = CheckTCP
	case "http":
		h.Method, h.Path = CheckHTTP, "/"
	default:
		return HealthCheck{}, fmt.Errorf("%q is no kind of health check; use tcp, http or off", method)
	}
	seen := map[string]bool{}
	for more {
		var setting string
		setting, settings, more = strings.Cut(settings, ",")
		key, value, ok := strings.Cut(strings.TrimSpace(setting), "=")
		if !ok {
			return HealthCheck{}, fmt.Errorf("%q is not of the form key=value", setting)
		}
		if seen[key] {
			return HealthCheck{}, fmt.Errorf("%s is there twice; keep one", key)
		}
		seen[key] = true
		if err := h.set(key, value); err != nil {
			return HealthCheck{}, err
		}
	}
	if h.Timeout > h.Interval {
		if seen["timeout"] {
			return HealthCheck{}, fmt.Errorf("timeout %s is longer than the interval, %s; make it shorter", h.Timeout, h.Interval)
		}
		h.Timeout = h.Interval
	}
	return h, nil
}

// set takes one setting.
func (h *HealthCheck) set(key, value string) (err error) {
	switch {
	case key == "interval":
		h.Interval, err = durationWithin(key, value, leastCheckInterval, mostCheckInterval)
	case key == "timeout":
		h.Timeout, err = durationWithin(key, value, leastCheckTimeout, mostCheckTimeout)
	case key == "rise":
		err = numberWithin(key, value, 1, mostCheckRise, &h.Rise)
	case key == "fall":
		err = numberWithin(key, value, 1, mostCheckRise, &h.Fall)
	case key == "port":
		err = numberWithin(key, value, 1, 65535, &h.Port)
	case key == "code" && h.Method == CheckHTTP:
		err = numberWithin(key, value, 200, 599, &h.Code)
	case key == "path" && h.Method == CheckHTTP:
		h.Path, err = value, checkPath(value)
	case key == "code" || key == "path":
		err = fmt.Errorf("%s is not allowed with %s; use http", key, h.Method)
	default:
		err = fmt.Errorf("%q is no setting of a health check; use interval, timeout, rise, fall, port, path or code", key)
	}
	return err
}

func durationWithin(key, value string, least, most time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d < least || d > most {
		return 0, fmt.Errorf("%s %q is not a time from %s to %s; write one like 5s or 500ms", key, value, least, most)
	}
	return d, nil
}

func numberWithin[T uint8 | uint16](key, value string, least, most uint64, to *T) error {
	n, err := strconv.ParseUint(value, 10, 16)
	if err != nil || n < least || n > most {
		return fmt.Errorf("%s %q is not a number from %d to %d", key, value, least, most)
	}
	*to = T(n)
	return nil
}

// checkPath accepts what can stand in a request's first line.
func checkPath(s string) error {
	odd := strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '#' })
	if _, err := url.ParseRequestURI(s); err != nil || odd || !strings.HasPrefix(s, "/") || len(s) > mostCheckPath {
		return fmt.Errorf("path %q is not a path of at most %d bytes that begins with a slash; write one like /healthz", s, mostCheckPath)
	}
	return nil
}

// String is the form that [ParseHealthCheck] reads, with all settings that are not 0.
func (h HealthCheck) String() string {
	if h.Method == NoCheck {
		return h.Method.String()
	}
	var b strings.Builder
	b.WriteString(h.Method.String())
	if h.Path != "" {
		fmt.Fprintf(&b, ",path=%s", h.Path)
	}
	if h.Code != 0 {
		fmt.Fprintf(&b, ",code=%d", h.Code)
	}
	if h.Port != 0 {
		fmt.Fprintf(&b, ",port=%d", h.Port)
	}
	fmt.Fprintf(&b, ",interval=%s,timeout=%s,rise=%d,fall=%d", h.Interval, h.Timeout, h.Rise, h.Fall)
	return b.String()
}

func (m CheckMethod) String() string { return [...]string{"off", "tcp", "http"}[m] }
