package relaybench

import (
	"context"
	"errors"
	"io"
	"time"
)

func runSoak(context.Context, time.Duration, io.Writer) error { return errors.New("soak is not there yet") }
