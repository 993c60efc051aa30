package scenario

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/lab"
	"github.com/svcproxy/svcproxy/internal/scenario/flow"
	"github.com/svcproxy/svcproxy/internal/scenario/world"
)

// dialing reads FROM PROTO ADDR:PORT.
func (s *script) dialing(args []string) (*lab.Host, lab.Dialing, []world.Target, error) {
	h, err := s.w.Host(args[0])
	if err != nil {
		return nil, lab.Dialing{}, nil, err
	}
	proto, err := lab.ParseProto(args[1])
	if err != nil {
		return nil, lab.Dialing{}, nil, world.Usagef("%v", err)
	}
	to, err := s.w.Targets(args[2])
	if err != nil {
		return nil, lab.Dialing{}, nil, err
	}
	n, err := s.kernel.labHost(h)
	return n, lab.Dialing{Proto: proto}, to, err
}

func (s *script) hold(args []string) error {
	if len(args) < 4 {
		return world.Usagef("want NAME FROM PROTO ADDR:PORT [sport=P] [every=D]")
	}
	h, d, to, err := s.dialing(args[1:4])
	if err != nil {
		return err
	}
	every := flow.DefaultPace
	for _, a := range args[4:] {
		k, v, _ := strings.Cut(a, "=")
		switch k {
		case "sport":
			d.SourcePort, err = flow.ParsePort(v)
		case "every":
			every, err = time.ParseDuration(v)
		default:
			err = fmt.Errorf("want sport= or every=")
		}
		if err == nil && every <= 0 {
			err = errors.New("want a time above 0")
		}
		if err != nil {
			return world.Usagef("%q: %v", a, err)
		}
	}
	name := args[0]
	for _, old := range s.kernel.held[name] {
		old.Close()
	}
	delete(s.kernel.held, name)
	for _, t := range to {
		d.To = t.Addr
		k, err := flow.Hold(name, h, d, t, every)
		if err != nil {
			return err
		}
		s.kernel.held[name] = append(s.kernel.held[name], k)
	}
	return nil
}

func (s *script) held(args []string) error {
	if len(args) != 3 || args[1] != "->" {
		return world.Usagef("want NAME -> A, reset or silent")
	}
	all := s.kernel.held[args[0]]
	if len(all) == 0 {
		return world.Usagef("there is no flow %q: open it with hold", args[0])
	}
	for _, k := range all {
		if err := k.Expect(args[2]); err != nil {
			return err
		}
	}
	return nil
}

// stray makes a server send a segment far outside the window on its connections.
func (s *script) stray(args []string) error {
	if len(args) != 2 {
		return world.Usagef("want NAME tcp:PORT")
	}
	h, err := s.w.Host(args[0])
	if err != nil {
		return err
	}
	svc, err := world.ParseServer(args[1])
	if err != nil {
		return err
	}
	srv := s.kernel.servers[h][svc]
	if srv == nil {
		return world.Usagef("host %s does not listen on %s", args[0], args[1])
	}
	n, err := srv.Stray()
	if err == nil && n == 0 {
		err = fmt.Errorf("no connection to %s is open", args[1])
	}
	return err
}

func (s *script) load(args []string) error {
	if len(args) == 2 {
		v, ok := strings.CutPrefix(args[1], "errors=")
		n, err := flow.ParsePort(v)
		all := s.kernel.loads[args[0]]
		if !ok || err != nil {
			return world.Usagef("%q: want errors=N", args[1])
		}
		if len(all) == 0 {
			return world.Usagef("there is no load %q", args[0])
		}
		for _, l := range all {
			if err := l.Expect(int(n)); err != nil {
				return err
			}
		}
		return nil
	}
	if len(args) != 5 {
		return world.Usagef("want NAME FROM PROTO ADDR:PORT rate=R, or NAME errors=N")
	}
	h, d, to, err := s.dialing(args[1:4])
	if err != nil {
		return err
	}
	rate, err := flow.ParseRate(args[4])
	if err != nil {
		return err
	}
	if l := s.kernel.loads[args[0]]; len(l) > 0 && !l[0].Ended() {
		return world.Usagef("there is a load %q already: end it with %s errors=N", args[0], args[0])
	}
	delete(s.kernel.loads, args[0])
	for _, t := range to {
		d.To = t.Addr
		l, err := flow.StartLoad(args[0], h, d, rate)
		if err != nil {
			return err
		}
		s.kernel.loads[args[0]] = append(s.kernel.loads[args[0]], l)
	}
	return nil
}
