package http

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/inbound"
	"converger/internal/ratelimit"
)

// registerInboundRoutes: where providers post.
func (s *server) registerInboundRoutes() {
	hook := route{auth: credentialSignature, bucket: ratelimit.Inbound, maxBody: s.MaxInboundBody}
	s.register(hook.by(http.MethodPost).at("/api/v1/channels/{channel_id}/inbound", s.receiveMessages).takes(bodyRaw))
	s.register(hook.by(http.MethodPost).at("/api/v1/channels/{channel_id}/status", s.receiveStatus).takes(bodyRaw))
	s.register(hook.by(http.MethodGet).at("/api/v1/channels/{channel_id}/inbound", s.handshake))
	// For providers that sign nothing and can keep a secret address.
	s.register(hook.by(http.MethodPost).at("/api/v1/channels/{channel_id}/inbound/{secret}", s.receiveMessages).takes(bodyRaw))
	s.register(hook.by(http.MethodPost).at("/api/v1/channels/{channel_id}/status/{secret}", s.receiveStatus).takes(bodyRaw))
}

// currentChannel is the channel of the path with its secrets, read from the database once for each version.
func (s *server) currentChannel(c *call) (*channel.Channel, error) {
	return s.Channels.Current(c.ctx(), c.Channel.TenantID, c.Channel.ID, c.Channel.Version)
}

func (s *server) receiveMessages(c *call) (*reply, error) {
	return s.receive(c, channel.EndpointInbound)
}

func (s *server) receiveStatus(c *call) (*reply, error) { return s.receive(c, channel.EndpointStatus) }

// callbackURL is where the provider of a channel has to post, messages and reports alike; "" for types that take nothing.
// secret tells that whoever knows it may post.
func (s *server) callbackURL(ch *channel.Channel) (address string, secret bool) {
	adapter, _ := s.Registry.Lookup(ch.Type)
	if _, ok := adapter.(channel.Receiver); !ok {
		return "", false
	}
	address = s.PublicURL + "/api/v1/channels/" + ch.ID.String() + "/inbound"
	if keeper, ok := adapter.(channel.PathKeeper); ok && keeper.KeepsPath(ch) {
		return address + "/" + ch.PathSecrets(time.Now())[0], true
	}
	return address, false
}

// receive takes a webhook: the signature over the exact bytes first, and only then what they say.
func (s *server) receive(c *call, endpoint channel.Endpoint) (*reply, error) {
	ch, err := s.currentChannel(c)
	if err != nil {
		return nil, err
	}
	req := inbound.Request{Channel: ch, Endpoint: endpoint, Header: c.r.Header, PathSecret: c.param("secret"), Body: c.body, Now: time.Now()}
	if err := s.Inbound.Verify(req); err != nil {
		if errors.Is(err, channel.ErrUnsigned) || errors.Is(err, channel.ErrSignature) {
			s.metrics.bad.WithLabelValues(c.route.pattern).Inc()
			p, _ := problemOf(err)
			return nil, p.with("Www-Authenticate", challenge(credentialSignature))
		}
		return nil, err
	}
	if c.proved = ch.RequireSignature; c.proved { // else nobody has proved anything
		s.Proofs.Add(s.proofKey(c), c.started)
	}
	a, err := s.Inbound.Receive(c.ctx(), req)
	if err != nil {
		if errors.Is(err, inbound.ErrUnreadable) {
			return nil, newProblem(codeMalformedBody, "The body can't be used: %s. It was stored as event %s.", detailOf(err), a.EventID)
		}
		return nil, err
	}
	return inboundReply(a)
}

// detailOf is what ErrUnreadable says was expected; package inbound keeps everything received out of it.
func detailOf(err error) string {
	return strings.TrimPrefix(err.Error(), inbound.ErrUnreadable.Error()+": ")
}

type inboundBody struct {
	Status            string      `json:"status"` // accepted
	EventID           uuid.UUID   `json:"event_id"`
	ActivityID        *uuid.UUID  `json:"activity_id,omitempty"`
	ActivityIDs       []uuid.UUID `json:"activity_ids,omitempty"`
	Duplicates        *int        `json:"duplicates,omitempty"`
	Rejected          *int        `json:"rejected,omitempty"`
	ReceiptsProcessed *int        `json:"receipts_processed,omitempty"`
}

// inboundReply is the answer to a webhook: 200 for a provider whose event is stored for a job; else 201 when something
// was created, 422 when everything was rejected, 200 for repeats and receipts.
func inboundReply(a inbound.Answer) (*reply, error) {
	b := inboundBody{Status: "accepted", EventID: a.EventID}
	if a.Acknowledged {
		return jsonReply(http.StatusOK, b)
	}
	messages := len(a.ActivityIDs) + len(a.Rejected)
	if len(a.Rejected) > 0 && len(a.ActivityIDs) == 0 && a.Receipts+a.UnknownReceipts == 0 {
		return nil, rejectedProblem(a.Rejected[0])
	}
	b.ReceiptsProcessed = &a.Receipts
	if messages > 0 {
		rejected := len(a.Rejected)
		b.ActivityIDs, b.Duplicates, b.Rejected = a.ActivityIDs, &a.Duplicates, &rejected
		if len(a.ActivityIDs) > 0 {
			b.ActivityID = &a.ActivityIDs[0]
		}
	}
	status := http.StatusOK
	if a.Created > 0 {
		status = http.StatusCreated
	}
	return jsonReply(status, b)
}

// rejectedProblem says why the first item could not be used, when none could.
func rejectedProblem(r inbound.Rejected) *problem {
	switch r.Reason {
	case inbound.ReasonConversationNotFound:
		return newProblem(codeNotFound, "The conversation that the message names does not exist.")
	case inbound.ReasonConversationClosed:
		return newProblem(codeConversationClosed, "The conversation that the message names is closed.")
	}
	return invalidProblem(&fault.Invalid{Fields: r.Fields})
}

// handshake answers a provider that checks the address before it uses it.
func (s *server) handshake(c *call) (*reply, error) {
	ch, err := s.currentChannel(c)
	if err != nil {
		return nil, err
	}
	text := "ok"
	if adapter, ok := s.Registry.Lookup(ch.Type); ok {
		if subscriber, ok := adapter.(channel.Subscriber); ok {
			// Lenient on purpose: what can't be read is not there, and a wrong token is refused below.
			if text, err = subscriber.Subscribe(ch, c.r.URL.Query()); err != nil {
				return nil, err
			}
			c.proved = true
		}
	}
	return &reply{status: http.StatusOK, contentType: typeText, body: []byte(text)}, nil
}
