package app

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/svcproxy/svcproxy/internal/choice"
	"github.com/svcproxy/svcproxy/internal/config"
)

// chosen is the mode to run, the configuration with it, and how it was chosen; nil if
// the configuration left no choice.
type chosen struct {
	config *config.Config
	mode   builtMode
	how    *choice.Result
}

// chooseMode returns the configured mode if it can work on this host, or the first of
// several that can. warn is told if that cannot be remembered; nil: it need not be.
func chooseMode(ctx context.Context, env Env, c *config.Config, warn func(error)) (chosen, error) {
	if len(c.Preference) < 2 {
		mode, err := supportedMode(ctx, c)
		return chosen{config: c, mode: mode}, err
	}
	chooser := choice.Chooser{
		Now: time.Now, Warn: warn,
		Try: func(ctx context.Context, mode string) error {
			next, err := c.Choose(mode)
			if err != nil {
				return err
			}
			_, err = supportedMode(ctx, next)
			return err
		},
	}
	if env.RunDir != "" {
		chooser.File = filepath.Join(env.RunDir, "mode.json")
	}
	r, err := chooser.Choose(ctx, c.Preference)
	if err != nil {
		return chosen{}, err
	}
	next, err := c.Choose(r.Mode)
	if err != nil {
		return chosen{}, err
	}
	mode, err := modeNamed(next)
	return chosen{config: next, mode: mode, how: &r}, err
}

// tellChoice makes known how the mode was chosen.
func (p *proxy) tellChoice() {
	if p.how == nil {
		return
	}
	p.metrics.Set("svcproxy_mode_choice", 1, p.how.Mode, strings.Join(p.how.Preference, ","), fmt.Sprint(p.how.Remembered))
	p.events.onNode("ModeChosen", false, p.how.String())
}
