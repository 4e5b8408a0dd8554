package upload

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// DefaultMaxBytes is how large a file may be unless somebody says otherwise, in bytes: 10 MiB.
const DefaultMaxBytes = 10 << 20

var (
	// ErrTooLarge says that the file has more bytes than allowed.
	ErrTooLarge = errors.New("upload: the file is too large")
	// ErrEmpty says that the file has no bytes.
	ErrEmpty = errors.New("upload: the file is empty")
)

// TypeError says that files of this type are not taken.
type TypeError struct{ Type string }

// Error implements error.
func (e *TypeError) Error() string { return "upload: file type " + e.Type + " is not allowed" }

// File is a file that was received.
type File struct {
	Key    string // in the storage
	Type   string // as sniffed
	Size   int64  // bytes
	SHA256 [sha256.Size]byte
}

// Options of an [Intake]. Zero members take the default in brackets.
type Options struct {
	MaxBytes   int64                 // of one file [DefaultMaxBytes]
	Types      []string              // those that are allowed where the tenant has no list of its own [DefaultTypes]
	Registerer prometheus.Registerer // nil: metrics are counted but not exported
}

// Intake takes files in. Its methods are safe for concurrent use.
type Intake struct {
	Storage
	maxBytes int64
	types    []string
	metrics  intakeMetrics
}

type intakeMetrics struct {
	stored, refused, failed prometheus.Counter
	bytes                   prometheus.Counter
}

// NewIntake makes an intake; it starts nothing.
func NewIntake(s Storage, o Options) *Intake {
	if o.MaxBytes == 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	if len(o.Types) == 0 {
		o.Types = DefaultTypes()
	}
	results := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "converger_uploads_total",
		Help: "Uploaded files by what became of their bytes: stored, refused (size, type, or a body that ended early), failed (the storage's fault).",
	}, []string{"result"})
	bytes := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "converger_upload_bytes_total",
		Help: "Bytes of the uploaded files that were stored.",
	})
	if o.Registerer != nil {
		o.Registerer.MustRegister(results, bytes)
	}
	return &Intake{Storage: s, maxBytes: o.MaxBytes, types: o.Types, metrics: intakeMetrics{
		stored: results.WithLabelValues("stored"), refused: results.WithLabelValues("refused"),
		failed: results.WithLabelValues("failed"), bytes: bytes,
	}}
}

// MaxBytes is how large a file may be.
func (in *Intake) MaxBytes() int64 { return in.maxBytes }

// Allowed is the list that holds for a tenant with this one: an empty one leaves it to the Options.
func (in *Intake) Allowed(own []string) []string {
	if len(own) > 0 {
		return own
	}
	return in.types
}

// Receive stores what r gives under key. allowed are the types that are taken, none: those of the Options. Memory is
// that of two buffers, whatever the size. After any error nothing is left: ErrTooLarge, ErrEmpty, a *TypeError,
// ErrStorage (wrapped), or the error of r.
func (in *Intake) Receive(ctx context.Context, key string, r io.Reader, allowed []string) (f File, err error) {
	defer func() {
		switch {
		case err == nil:
			in.metrics.stored.Inc()
			in.metrics.bytes.Add(float64(f.Size))
		case errors.Is(err, ErrStorage):
			in.metrics.failed.Inc()
		default:
			in.metrics.refused.Inc()
		}
	}()
	b := bufio.NewReaderSize(r, SniffLen)
	head, err := b.Peek(SniffLen)
	if err != nil && !errors.Is(err, io.EOF) {
		return File{}, err
	}
	if len(head) == 0 {
		return File{}, ErrEmpty
	}
	f = File{Key: key, Type: Sniff(head)}
	if !slices.Contains(in.Allowed(allowed), f.Type) {
		return File{}, &TypeError{f.Type}
	}
	m := &meter{r: b, left: in.maxBytes, hash: sha256.New()}
	if err := in.Put(ctx, key, m); err != nil {
		if m.err != nil {
			return File{}, m.err
		}
		return File{}, fmt.Errorf("%w: %w", ErrStorage, err)
	}
	f.Size = in.maxBytes - m.left
	m.hash.Sum(f.SHA256[:0])
	return f, nil
}

// meter counts and hashes what is read through it, and fails beyond its limit.
type meter struct {
	r    io.Reader
	left int64
	hash hash.Hash
	err  error // other than the end: whose fault it is when a Put fails
}

func (m *meter) Read(b []byte) (int, error) {
	n, err := m.r.Read(b)
	if m.left -= int64(n); m.left < 0 {
		n, err = 0, ErrTooLarge
	}
	m.hash.Write(b[:n])
	if err != nil && !errors.Is(err, io.EOF) {
		m.err = err
	}
	return n, err
}
