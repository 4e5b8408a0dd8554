package simulate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"converger/internal/signature"
)

const (
	maxDelivery    = 1 << 20 // bytes of a body; more is refused with 413
	maxRemembered  = 10_000  // delivery ids whose tries are counted
	stopGrace      = 2 * time.Second
	deliveryHeader = "X-Converger-Delivery-Id"
	eventHeader    = "X-Converger-Event"
)

// ReceiverOptions tells Receiver where to listen and how to answer.
type ReceiverOptions struct {
	// Addr is host:port; port 0 picks a free one. Required.
	Addr string
	// Secrets are the texts of the channel secrets that a delivery may be signed
	// with. Without any, signatures are not checked.
	Secrets []string
	// Out receives a line for each delivery and a summary at the end. Required.
	Out io.Writer
	// ShowBody prints the body under each line.
	ShowBody bool
	// Yes permits an Addr that other machines can reach.
	Yes bool
	// Behaviour is how to answer; the zero value is 200 at once.
	Behaviour Behaviour
	// Ready, if set, is called once with the address, when connections are
	// accepted.
	Ready func(net.Addr)
}

// Behaviour is how a receiver misbehaves. FailFirst and FailRate choose the
// deliveries that get it; with neither, all do. The others are answered with
// 200 at once. Of Hang, DropConnection and Redirect only one may be set.
type Behaviour struct {
	// FailFirst misbehaves for the first tries of each delivery, so many of them.
	FailFirst int
	// FailRate misbehaves for this share of all tries, from 0 to 1, at random.
	FailRate float64
	// Seed makes the choice of FailRate repeatable. Zero is a seed like any other.
	Seed uint64

	// Status is the answer, 200 to 599. Zero means 307 for a Redirect; 500 if
	// FailFirst or FailRate is set without Delay, HugeBody and SlowBody; 200
	// otherwise.
	Status int
	// RetryAfter is sent along in whole seconds, rounded up, if it is not zero.
	RetryAfter time.Duration
	// Delay is how long to wait before answering.
	Delay time.Duration
	// Hang reads the request and never answers.
	Hang bool
	// DropConnection reads the request and closes the connection.
	DropConnection bool
	// Redirect answers with this Location.
	Redirect string
	// HugeBody is how many bytes to send as the body of the answer.
	HugeBody int64
	// SlowBody sends the body of the answer byte by byte, this far apart, and
	// without HugeBody never ends it.
	SlowBody time.Duration
}

// resolve checks the options and fills in the status.
func (b Behaviour) resolve() (Behaviour, error) {
	exclusive := 0
	for _, set := range []bool{b.Hang, b.DropConnection, b.Redirect != ""} {
		if set {
			exclusive++
		}
	}
	switch {
	case b.FailFirst < 0:
		return b, fmt.Errorf("fail first %d: want 0 or more", b.FailFirst)
	case !(b.FailRate >= 0 && b.FailRate <= 1): // so that NaN fails
		return b, fmt.Errorf("fail rate %v: want 0 to 1", b.FailRate)
	case b.Status != 0 && (b.Status < 200 || b.Status > 599):
		return b, fmt.Errorf("status %d: want 200 to 599", b.Status)
	case b.RetryAfter < 0 || b.Delay < 0 || b.SlowBody < 0 || b.HugeBody < 0:
		return b, errors.New("a negative duration or size")
	case exclusive > 1:
		return b, errors.New("hang, drop the connection and redirect exclude each other")
	}
	if b.Status == 0 {
		b.Status = http.StatusOK
		if b.Redirect != "" {
			b.Status = http.StatusTemporaryRedirect
		} else if b.selective() && b.Delay == 0 && b.HugeBody == 0 && b.SlowBody == 0 {
			b.Status = http.StatusInternalServerError
		}
	}
	return b, nil
}

// selective says that some deliveries are answered properly.
func (b Behaviour) selective() bool { return b.FailFirst > 0 || b.FailRate > 0 }

// String says what a delivery gets, for the line that is printed.
func (b Behaviour) String() string {
	var text string
	switch {
	case b.Hang:
		text = "no answer"
	case b.DropConnection:
		text = "connection dropped"
	case b.Redirect != "":
		text = fmt.Sprintf("%d to %s", b.Status, b.Redirect)
	default:
		text = strconv.Itoa(b.Status)
	}
	if b.Delay > 0 {
		text += " after " + b.Delay.String()
	}
	if b.HugeBody > 0 {
		text += fmt.Sprintf(", %d B", b.HugeBody)
	}
	if b.SlowBody > 0 {
		text += ", a byte every " + b.SlowBody.String()
	}
	return text
}

// Receiver listens on Addr until ctx ends, then prints a summary and returns
// nil. Every POST on any path is a delivery: a line says what it is, whether
// both signatures of the hub (X-Converger-Signature and Standard Webhooks) are
// VALID, INVALID or UNCHECKED, how often this delivery id has come, and what is
// answered. Bodies beyond 1 MiB are refused. Repeats are counted over the last
// 10,000 delivery ids; memory is bounded by that and by the open connections.
func Receiver(ctx context.Context, o ReceiverOptions) error {
	if o.Out == nil {
		return errors.New("simulate receiver: no writer for the output")
	}
	behaviour, err := o.Behaviour.resolve()
	if err != nil {
		return fmt.Errorf("simulate receiver: %w", err)
	}
	host, _, err := net.SplitHostPort(o.Addr)
	if err != nil {
		return fmt.Errorf("simulate receiver: address: %w", err)
	}
	if !o.Yes {
		if err := RequireLoopback(ctx, net.DefaultResolver.LookupNetIP, host); err != nil {
			return fmt.Errorf("simulate receiver: address: %w", err)
		}
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.Addr)
	if err != nil {
		return fmt.Errorf("simulate receiver: %w", err)
	}

	r := newReceiver(o, behaviour)
	server := &http.Server{
		Handler:           r,
		BaseContext:       func(net.Listener) context.Context { return ctx }, // ends waits at a stop
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          log.New(io.Discard, "", 0), // broken clients only
	}
	fmt.Fprintf(o.Out, "listening on http://%s\n", listener.Addr()) // before a delivery prints
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if o.Ready != nil {
		o.Ready(listener.Addr())
	}

	select {
	case err = <-served: // the listener broke
		_ = server.Close()
	case <-ctx.Done():
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close() // clients that do not read what they are sent
		}
		if err = <-served; errors.Is(err, http.ErrServerClosed) {
			err = nil
		}
	}
	r.summarise()
	if err != nil {
		return fmt.Errorf("simulate receiver: %w", err)
	}
	return nil
}

// receiver is the handler. Its methods may be called concurrently.
type receiver struct {
	out       io.Writer
	showBody  bool
	keys      [][]byte // of the timestamped scheme
	standard  [][]byte // of Standard Webhooks
	behaviour Behaviour

	// mu guards everything below and, so that lines stay whole and in the order
	// of their numbers, writing to out.
	mu       sync.Mutex
	rand     *rand.Rand
	tries    map[string]int // by delivery id
	order    []string       // the ids of tries, a ring once it is full
	oldest   int            // of the ring
	total    int
	repeats  int
	verdicts map[string]int
	answers  map[string]int
}

func newReceiver(o ReceiverOptions, b Behaviour) *receiver {
	r := &receiver{
		out: o.Out, showBody: o.ShowBody, behaviour: b,
		rand:  rand.New(rand.NewPCG(b.Seed, 0)),
		tries: map[string]int{}, verdicts: map[string]int{}, answers: map[string]int{},
	}
	for _, secret := range o.Secrets {
		if secret != "" {
			r.keys = append(r.keys, []byte(secret))
			r.standard = append(r.standard, signature.StandardKey(secret))
		}
	}
	return r
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "deliveries are posted", http.StatusMethodNotAllowed)
		return
	}
	r.answer(w, req, r.accept(w, req))
}

// accept reads, verifies, counts and prints a delivery and returns what to do
// with it. The body is not kept beyond it.
func (r *receiver) accept(w http.ResponseWriter, req *http.Request) Behaviour {
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxDelivery))
	if err != nil {
		refused := Behaviour{Status: http.StatusBadRequest}
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			refused.Status = http.StatusRequestEntityTooLarge
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.answers[refused.String()]++
		fmt.Fprintf(r.out, "%s  unreadable body: %s  -> %s\n", clock(), clean(err.Error(), 100), refused)
		return refused
	}
	now := time.Now()
	converger := r.verdict(signature.VerifyTimestamped(req.Header, body, r.keys, now))
	standard := r.verdict(signature.VerifyStandard(req.Header, body, r.standard, now))
	id := clean(cmp.Or(req.Header.Get(deliveryHeader), req.Header.Get(signature.HeaderStandardID)), 128)

	r.mu.Lock()
	defer r.mu.Unlock()
	try := r.count(id)
	b := r.choose(try)
	r.verdicts[worse(converger, standard)]++
	r.answers[b.String()]++
	fmt.Fprintf(r.out, "%s  #%d %s  delivery %s  try %d  %s  %d B  converger %s  standard %s  -> %s\n",
		clock(), r.total, clean(req.URL.Path, 60), cmp.Or(id, "without id"), try, describe(req.Header, body), len(body),
		converger, standard, b)
	if r.showBody {
		for line := range strings.Lines(string(body)) {
			fmt.Fprintf(r.out, "    %s\n", clean(line, maxDelivery))
		}
	}
	return b
}

// count notes a try of a delivery and returns its number, from 1. Deliveries
// without an id cannot be told apart; each is a first try. It needs the lock.
func (r *receiver) count(id string) int {
	r.total++
	if id == "" {
		return 1
	}
	if _, known := r.tries[id]; !known {
		if len(r.order) < maxRemembered {
			r.order = append(r.order, id)
		} else {
			delete(r.tries, r.order[r.oldest])
			r.order[r.oldest] = id
			r.oldest = (r.oldest + 1) % maxRemembered
		}
	}
	r.tries[id]++
	if r.tries[id] > 1 {
		r.repeats++
	}
	return r.tries[id]
}

// choose returns the behaviour for a try. It needs the lock.
func (r *receiver) choose(try int) Behaviour {
	b := r.behaviour
	if b.selective() && try > b.FailFirst && r.rand.Float64() >= b.FailRate {
		return Behaviour{Status: http.StatusOK}
	}
	return b
}

// answer does what b says. When the client leaves or the receiver stops before
// the end, it aborts, so that an incomplete answer never looks complete.
func (r *receiver) answer(w http.ResponseWriter, req *http.Request, b Behaviour) {
	ctx := req.Context()
	if b.Delay > 0 && !pause(ctx, b.Delay) {
		panic(http.ErrAbortHandler) // net/http closes the connection
	}
	if b.Hang {
		<-ctx.Done()
	}
	if b.Hang || b.DropConnection {
		panic(http.ErrAbortHandler)
	}
	if b.Redirect != "" {
		w.Header().Set("Location", b.Redirect)
	}
	if b.RetryAfter > 0 {
		seconds := (b.RetryAfter + time.Second - 1) / time.Second
		w.Header().Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(b.Status)
	switch {
	case b.SlowBody > 0:
		for n := int64(0); b.HugeBody == 0 || n < b.HugeBody; n++ {
			if _, err := w.Write([]byte{'.'}); err != nil {
				panic(http.ErrAbortHandler)
			}
			if err := http.NewResponseController(w).Flush(); err != nil || !pause(ctx, b.SlowBody) {
				panic(http.ErrAbortHandler)
			}
		}
	case b.HugeBody > 0:
		chunk := []byte(strings.Repeat(".", 32<<10))
		for left := b.HugeBody; left > 0; left -= int64(len(chunk)) {
			if _, err := w.Write(chunk[:min(left, int64(len(chunk)))]); err != nil || ctx.Err() != nil {
				panic(http.ErrAbortHandler)
			}
		}
	}
}

// pause waits and reports whether it waited to the end.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// The verdicts on a signature; an invalid one has its reason added.
const (
	valid     = "VALID"
	invalid   = "INVALID"
	unchecked = "UNCHECKED"
)

func (r *receiver) verdict(err error) string {
	switch {
	case len(r.keys) == 0:
		return unchecked
	case err == nil:
		return valid
	}
	return fmt.Sprintf("%s (%s)", invalid, strings.TrimPrefix(err.Error(), "signature: "))
}

// worse returns the verdict on a delivery from those on its signatures, without
// the reason.
func worse(a, b string) string {
	if strings.HasPrefix(a, invalid) || strings.HasPrefix(b, invalid) {
		return invalid
	}
	return a // both checked or both unchecked
}

// describe says what a delivery is about: the event, and the type and the text
// of the activity in its body where there are such.
func describe(header http.Header, body []byte) string {
	var activity struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	// A body of another form leaves the members empty.
	_ = json.Unmarshal(body, &activity)
	parts := []string{clean(header.Get(eventHeader), 60), clean(activity.Type, 60)}
	if activity.Text != "" {
		parts = append(parts, fmt.Sprintf("%q", clean(activity.Text, 60)))
	}
	parts = slices.DeleteFunc(parts, func(s string) bool { return s == "" })
	return cmp.Or(strings.Join(parts, " "), "unknown event")
}

func clock() string { return time.Now().Format("15:04:05.000") }

func (r *receiver) summarise() {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.out, "deliveries: %d, repeats: %d; signatures: %s; answers: %s\n",
		r.total, r.repeats, counts(r.verdicts), counts(r.answers))
}
