package messages

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/wire"
	"converger/internal/simulate"
)

// Options is what a run is made of. Zero numbers are not defaults: the caller chooses them.
type Options struct {
	// Hub is the hub, with an operator's token that may write.
	Hub *hub.Client
	// MetricsToken opens the hub's /metrics; "" tries without.
	MetricsToken string

	Tenants       int // at most 1,000
	Channels      int // of each tenant
	Conversations int // of each channel, at most 200,000 in all

	Callers  int           // connections, and so the most requests under way at one time; at most 10,000
	Rate     float64       // messages a second that are due; 0: as fast as the callers get their answers
	Duration time.Duration // of the load, after the warm-up; at most a day
	WarmUp   time.Duration // of the same load before it, not counted
	Inbound  float64       // share of the messages that come as signed webhooks, 0 to 1
	Size     int           // bytes of each text, 1 to 60,000; a shorter one than its number needs gets longer
	Timeout  time.Duration // of one request
	Drain    time.Duration // how long to wait at the end for what has not arrived

	// ReceiverAddress is where the built-in receiver listens (host:port); the hub must reach it. ReceiverURL has deliveries
	// go elsewhere, so that nothing is known of them. With neither nothing is delivered.
	ReceiverAddress string
	ReceiverURL     string

	// Database and PostgresPID and HubPID are known when the hub was started for the run: then tables are looked at, and
	// who used the processors.
	Database    *pgxpool.Pool
	HubPID      int
	PostgresPID int

	Row  time.Duration // of a row of the report
	Soak bool          // judge whether the last third was like the second
	Yes  bool          // permit a hub or a receiver on other machines
	Keep bool          // leave tenants and channels as they are

	// Progress receives a line each Every, and each row. Required.
	Progress io.Writer
	Every    time.Duration
}

// The largest runs: a slip of the finger must not flood anybody.
const (
	maxTenants       = 1000
	maxConversations = 200_000
	maxCallers       = 10_000
	maxRate          = 1e6
	maxDuration      = 24 * time.Hour
	maxSize          = 60_000 // the API takes texts of 64 KiB
)

// validate names everything that is wrong.
func (o Options) validate(ctx context.Context) (wire.Target, error) {
	var all []error
	need := func(ok bool, format string, args ...any) {
		if !ok {
			all = append(all, fmt.Errorf(format, args...))
		}
	}
	need(o.Tenants >= 1 && o.Tenants <= maxTenants, "%d tenants: want 1 to %d", o.Tenants, maxTenants)
	need(o.Channels >= 1 && o.Channels <= 100, "%d channels: want 1 to 100", o.Channels)
	need(o.Conversations >= 1, "%d conversations: want 1 or more", o.Conversations)
	need(o.Tenants*o.Channels*o.Conversations <= maxConversations, "%d conversations in all: want at most %d", o.Tenants*o.Channels*o.Conversations, maxConversations)
	need(o.Callers >= 1 && o.Callers <= maxCallers, "%d callers: want 1 to %d", o.Callers, maxCallers)
	need(o.Rate >= 0 && o.Rate <= maxRate, "rate %g: want 0 to %g a second", o.Rate, maxRate)
	need(o.Duration > 0 && o.Duration <= maxDuration, "duration %s: want more than 0 and at most %s", o.Duration, maxDuration)
	need(o.WarmUp >= 0 && o.Drain >= 0 && o.Timeout > 0, "times below 0")
	need(o.Inbound >= 0 && o.Inbound <= 1, "share of inbound %g: want 0 to 1", o.Inbound)
	need(o.Size >= 1 && o.Size <= maxSize, "texts of %d bytes: want 1 to %d", o.Size, maxSize)
	need(o.Row > 0 && o.Every > 0, "no time between rows or lines of progress")
	need(o.ReceiverAddress == "" || o.ReceiverURL == "", "a receiver of our own and another one")
	target, err := wire.ParseTarget(o.Hub.Base)
	if err != nil {
		all = append(all, fmt.Errorf("the hub: %w", err))
		return target, errors.Join(all...)
	}
	target.Timeout = o.Timeout
	if !o.Yes {
		target.Control = simulate.LoopbackOnly
		all = append(all, simulate.StayHere(ctx, "the hub", o.Hub.Base), simulate.StayHere(ctx, "the receiver", o.ReceiverURL))
		if o.ReceiverAddress != "" {
			all = append(all, simulate.StayHere(ctx, "the receiver", "http://"+o.ReceiverAddress))
		}
	}
	return target, errors.Join(all...)
}

// text is that of a message: its key, padded to the size.
func (o Options) text(key string) string {
	return key + " " + strings.Repeat("x", max(0, o.Size-len(key)-1))
}
