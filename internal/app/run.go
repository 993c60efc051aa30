package app

import (
	"context"
	"fmt"
	"strings"

	"github.com/svcproxy/svcproxy/internal/config"
)

// runProxy does what the proxy's command line asks for: run it, or one of the
// things after which the program ends.
func runProxy(ctx context.Context, env Env, flags *config.Flags) error {
	switch {
	case flags.Version == "true" || flags.Version == "raw":
		return env.printVersion(flags.Version)
	case strings.HasPrefix(flags.Version, "v"):
		env.Version = flags.Version
	case flags.Version != "" && flags.Version != "false":
		return fmt.Errorf("flag --version: %q is none of true, raw and a version like v1.2.3", flags.Version)
	}
	content := &lastRead{read: env.ReadFile}
	c, warnings, err := flags.Load(content.file)
	if err != nil {
		warn(env, warnings)
		return err
	}
	log := newLog(env.Stderr, c.Log)
	if err := log.bridgeKlog(c.Log.Verbosity); err != nil {
		return err
	}
	switch {
	case flags.WriteConfigTo != "":
		warn(env, warnings)
		return c.WriteFile(flags.WriteConfigTo)
	case flags.Cleanup:
		warn(env, warnings)
		return cleanup(ctx, c, log.Logger, cleaning{})
	}
	choice, err := chooseMode(ctx, env, c, func(err error) { log.Warn("the mode may be chosen anew at the next start", "err", err) })
	if err != nil {
		warn(env, warnings)
		return err
	}
	c = choice.config
	setUpProcess(c, env.Getenv, log.Logger)
	if flags.InitOnly {
		warn(env, warnings)
		setUpKernel(env.Host, c.Conntrack, log.Logger)
		return nil
	}
	p, err := newProxy(ctx, env, flags, choice, log)
	if err != nil {
		warn(env, warnings)
		return err
	}
	p.warn(warnings)
	return p.run(ctx, content.bytes)
}

// supportedMode returns the mode if it can work on this host.
func supportedMode(ctx context.Context, c *config.Config) (builtMode, error) {
	mode, err := modeNamed(c)
	if err != nil {
		return mode, err
	}
	if err := mode.Supported(ctx); err != nil {
		return mode, fmt.Errorf("mode %s cannot work on this host: %w", c.Mode, err)
	}
	return mode, nil
}

// lastRead remembers what was read last.
type lastRead struct {
	read  func(string) ([]byte, error)
	bytes []byte
}

func (l *lastRead) file(name string) ([]byte, error) {
	b, err := l.read(name)
	l.bytes = b
	return b, err
}

// loadConfig parses a command line of the proxy.
func loadConfig(env Env, args []string) (*config.Config, []string, error) {
	flags := config.NewFlags()
	cmd := newRunWith(env, flags)
	if err := cmd.ParseFlags(args); err != nil {
		return nil, nil, err
	}
	return flags.Load(env.ReadFile)
}
