package channel

import (
	"log/slog"
	"time"

	"golang.org/x/time/rate"
)

// UnsignedWarning logs that a channel took a request without proof of its origin, as channels with require_signature
// off do. At most once a minute, for strangers decide how often it happens. Safe for concurrent use.
type UnsignedWarning struct {
	log       *slog.Logger
	sometimes rate.Sometimes
}

// NewUnsignedWarning makes one.
func NewUnsignedWarning(log *slog.Logger) *UnsignedWarning {
	return &UnsignedWarning{log: log, sometimes: rate.Sometimes{Interval: time.Minute}}
}

// Warn logs, or not. what says which proof was missing.
func (w *UnsignedWarning) Warn(ch *Channel, what string) {
	w.sometimes.Do(func() {
		w.log.Warn("DEPRECATED: a request was accepted without a proof of its origin; sign it and set require_signature",
			"channel_id", ch.ID, "tenant_id", ch.TenantID, "what", what)
	})
}
