package http

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/ratelimit"
)

const clientPrefix = "/api/v1/converger"

// registerClientRoutes: the client API, for end users' programs with a token of their channel. Members are camelCase.
func (s *server) registerClientRoutes() {
	const base = clientPrefix
	token := route{auth: credentialToken, bucket: ratelimit.APIRead}
	get, post := token.by(http.MethodGet), token.by(http.MethodPost)

	s.register(route{
		method: http.MethodPost, auth: credentialSecret, bucket: ratelimit.TokenGenerate,
	}.at(base+"/tokens/generate", s.generateToken).takes(bodyOptional))
	s.register(post.at(base+"/tokens/refresh", s.refreshToken).limitedBy(ratelimit.TokenGenerate))
	s.register(route{
		method: http.MethodPost, auth: credentialLegacy, bucket: ratelimit.TokenCreate,
	}.at("/api/v1/tokens", s.legacyToken).takes(bodyJSON))
	s.register(post.at(base+"/conversations", s.clientCreateConversation))
	s.register(get.at(base+"/conversations/{conversation_id}", s.clientGetConversation))
	s.register(post.at(base+"/conversations/{conversation_id}/close", s.clientCloseConversation))
	s.register(post.at(base+"/conversations/{conversation_id}/reopen", s.clientReopenConversation))
	s.register(post.at(base+"/conversations/{conversation_id}/activities", s.clientCreateActivity).takes(bodyJSON).limitedBy(ratelimit.ActivityCreate))
	s.register(get.at(base+"/conversations/{conversation_id}/activities", s.clientListActivities))
	s.registerUploadRoutes()
}

// tokenBody is the answer of tokens/generate and tokens/refresh.
type tokenBody struct {
	ConversationID *uuid.UUID `json:"conversationId"`
	Token          string     `json:"token"`
	ExpiresIn      int        `json:"expires_in"` // seconds
}

// clientConversationBody is a conversation as its client sees it, with a token bound to it.
type clientConversationBody struct {
	tokenBody
	StreamURL *string `json:"streamUrl"` // null: this server has no stream
}

func (s *server) generateToken(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	claims := auth.Claims{TenantID: c.Tenant.ID, ChannelID: c.Channel.ID, Scope: f.str("scope")}
	who := f.sub("user")
	if user := who.optStr("id"); user != nil {
		who.checkUser("id", *user)
		claims.UserID = *user
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	if claims.Scope != "" && claims.Scope != auth.ScopeChannel {
		return nil, newProblem(codeInvalidParameter, `Invalid scope: it must be "channel", or left out.`)
	}
	return s.issue(claims)
}

// refreshToken gives a token for the same claims and a new term. Several refreshes at once all succeed: tokens keep no
// state that they could fight over.
func (s *server) refreshToken(c *call) (*reply, error) { return s.issue(*c.Token) }

// legacyToken is the older way to a token, for one conversation and one user. The tokens that older servers sent in
// X-Channel-Token are not issued here: the header takes the channel's secret.
func (s *server) legacyToken(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("conversation_id")
	f.require("user_id")
	conversation, user := f.id("conversation_id"), f.str("user_id")
	if f.has("user_id") {
		f.checkUser("user_id", user)
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	if _, err := s.Activities.GetConversation(c.ctx(), c.Tenant.ID, *conversation, &c.Channel.ID); err != nil {
		return nil, err
	}
	b, err := s.token(auth.Claims{TenantID: c.Tenant.ID, ChannelID: c.Channel.ID, ConversationID: *conversation, UserID: user})
	if err != nil {
		return nil, err
	}
	p, err := jsonReply(http.StatusCreated, struct {
		Token     string `json:"token"`
		ExpiresIn int    `json:"expires_in"`
	}{b.Token, b.ExpiresIn})
	if err != nil {
		return nil, err
	}
	return p.with("Link", `</api/v1/converger/tokens/generate>; rel="successor-version"`), nil
}

// checkUser notes what is wrong with the id of a user for whom a token is asked.
func (f *fields) checkUser(name, user string) {
	switch {
	case user == "" || len(user) > auth.MaxUserID:
		f.fault(name, fault.TooLong, "must have 1 to %d bytes", auth.MaxUserID)
	case user == activity.SenderSystem:
		f.fault(name, fault.Conflict, "is the name under which the hub itself speaks")
	}
}

func (s *server) issue(claims auth.Claims) (*reply, error) {
	b, err := s.token(claims)
	if err != nil {
		return nil, err
	}
	return jsonReply(http.StatusOK, b)
}

func (s *server) token(claims auth.Claims) (tokenBody, error) {
	text, claims, err := s.Tokens.Issue(time.Now(), claims)
	if err != nil {
		return tokenBody{}, err
	}
	b := tokenBody{Token: text, ExpiresIn: int(auth.TokenTTL.Seconds())}
	if claims.ConversationID != uuid.Nil {
		b.ConversationID = &claims.ConversationID
	}
	return b, nil
}

// bound is the answer that hands out a token for one conversation.
func (s *server) bound(c *call, status int, conversation uuid.UUID) (*reply, error) {
	claims := *c.Token
	claims.ConversationID, claims.Scope = conversation, ""
	b, err := s.token(claims)
	if err != nil {
		return nil, err
	}
	return jsonReply(status, clientConversationBody{tokenBody: b})
}

// clientCreateConversation opens a conversation on the token's channel; its user becomes the participant.
func (s *server) clientCreateConversation(c *call) (*reply, error) {
	n := activity.NewConversation{ChannelID: c.Channel.ID}
	if c.Token.UserID != "" {
		n.Participant = &channel.Participant{Identities: []channel.Identity{{Kind: channel.IdentityExternalID, Value: c.Token.UserID}}}
	}
	v, err := s.Activities.CreateConversation(c.ctx(), c.Tenant.ID, n)
	if err != nil {
		return nil, err
	}
	return s.bound(c, http.StatusCreated, v.ID)
}

// ownConversation is the conversation in the path, if the token may name it. Whether it exists on the token's channel is
// for the store to say.
func (c *call) ownConversation() (uuid.UUID, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return uuid.Nil, err
	}
	if c.Token.ConversationID != uuid.Nil && c.Token.ConversationID != id {
		return uuid.Nil, newProblem(codeConversationBound, "The token is bound to another conversation.")
	}
	return id, nil
}

func (s *server) clientGetConversation(c *call) (*reply, error) {
	id, err := c.ownConversation()
	if err != nil {
		return nil, err
	}
	if _, err := s.Activities.GetConversation(c.ctx(), c.Tenant.ID, id, &c.Channel.ID); err != nil {
		return nil, err
	}
	return s.bound(c, http.StatusOK, id)
}

func (s *server) clientCloseConversation(c *call) (*reply, error) {
	id, err := c.ownConversation()
	if err != nil {
		return nil, err
	}
	v, _, err := s.Activities.Close(c.ctx(), c.Tenant.ID, id, &c.Channel.ID, reasonManual)
	if err != nil {
		return nil, err
	}
	return clientStatus(v)
}

func (s *server) clientReopenConversation(c *call) (*reply, error) {
	id, err := c.ownConversation()
	if err != nil {
		return nil, err
	}
	v, _, err := s.Activities.Reopen(c.ctx(), c.Tenant.ID, id, &c.Channel.ID, reasonManual)
	if err != nil {
		return nil, err
	}
	return clientStatus(v)
}

func clientStatus(v activity.Conversation) (*reply, error) {
	return jsonReply(http.StatusOK, struct {
		ConversationID uuid.UUID `json:"conversationId"`
		Status         string    `json:"status"`
	}{v.ID, v.Status})
}

// anonymous is the sender of a token without a user.
const anonymous = "user"

// speaker is the token's own user, as sender and as the owner of idempotency keys. A user whose id is "user" is somebody
// else than an anonymous one, though both are shown alike.
func (c *call) speaker() (sender, caller string) {
	if c.Token.UserID == "" {
		return anonymous, "anonymous"
	}
	return c.Token.UserID, "user:" + c.Token.UserID
}

// author is who writes through the token. Anonymous users are told apart by the conversation that their token is bound to;
// without one they can't be, and edit nothing.
func (c *call) author() string {
	switch {
	case c.Token.UserID != "":
		return "user:" + c.Token.UserID
	case c.Token.ConversationID != uuid.Nil:
		return "conversation:" + c.Token.ConversationID.String()
	}
	return ""
}

// message completes an activity of the token's own user by the members of f that all have, whichever way they come. n holds
// the others; the error tells the faults of all.
func (c *call) message(conversation uuid.UUID, key string, f *fields, n activity.New) (activity.New, error) {
	sender, caller := c.speaker()
	n.TenantID, n.ConversationID, n.ChannelID = c.Tenant.ID, conversation, &c.Channel.ID
	n.Caller, n.IdempotencyKey, n.Sender, n.Author = caller, key, sender, c.author()
	n.Type, n.Text = f.str("type"), f.optStr("text")
	from := f.sub("from").optStr("id")
	if err := f.err(); err != nil {
		return n, err
	}
	if from != nil && *from != sender {
		return n, newProblem(codeSenderMismatch, "from.id names another user than the token.")
	}
	return n, nil
}

// clientCreateActivity posts as the token's own user.
func (s *server) clientCreateActivity(c *call) (*reply, error) {
	id, err := c.ownConversation()
	if err != nil {
		return nil, err
	}
	key, err := idempotencyKey(c.r.Header)
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	name, _ := f.firstRaw("channelData", "metadata")
	n, err := c.message(id, key, f, activity.New{Metadata: f.object(name), Attachments: f.list("attachments"), ReplyToID: f.id("replyToId")})
	if err != nil {
		return nil, err
	}
	a, repeat, err := s.append(c, n)
	if err != nil {
		return nil, renamed(err)
	}
	p, err := jsonReply(http.StatusOK, struct {
		ID  uuid.UUID `json:"id"`
		Seq int64     `json:"seq"`
	}{a.ID, a.Seq})
	if err != nil {
		return nil, err
	}
	return replayed(p, repeat), nil
}

// clientNames are the members that the client API calls otherwise than package activity.
var clientNames = map[string]string{"/metadata": "/channelData", "/reply_to_id": "/replyToId", "/sender": "/from/id"}

// renamed gives the faults of an activity the names that its client used.
func renamed(err error) error {
	var invalid *fault.Invalid
	if !errors.As(err, &invalid) {
		return err
	}
	out := &fault.Invalid{Fields: slices.Clone(invalid.Fields)}
	for i, f := range out.Fields {
		if name, ok := clientNames[f.Pointer]; ok {
			out.Fields[i].Pointer = name
		}
	}
	return out
}

// clientActivity is an activity on the client API.
type clientActivity struct {
	ID             uuid.UUID       `json:"id"`
	Type           string          `json:"type"`
	From           clientFrom      `json:"from"`
	Text           *string         `json:"text"`
	Timestamp      time.Time       `json:"timestamp"`
	Attachments    json.RawMessage `json:"attachments"`
	ConversationID uuid.UUID       `json:"conversationId"`
	ChannelData    json.RawMessage `json:"channelData"`
	ReplyToID      *uuid.UUID      `json:"replyToId"`
	EditedAt       *time.Time      `json:"editedAt"`
	DeletedAt      *time.Time      `json:"deletedAt"`
}

type clientFrom struct {
	ID string `json:"id"`
}

func (s *server) clientListActivities(c *call) (*reply, error) {
	id, err := c.ownConversation()
	if err != nil {
		return nil, err
	}
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	given := q.Get("watermark")
	after, err := s.Activities.ReadWatermark(c.ctx(), c.Tenant.ID, id, &c.Channel.ID, given)
	if err != nil {
		return nil, err
	}
	found, more, err := s.Activities.List(c.ctx(), c.Tenant.ID, id, &c.Channel.ID, after, pageLimit(q, defaultActivities, maxActivities))
	if err != nil {
		return nil, err
	}
	bodies := make([]clientActivity, len(found))
	for i, a := range found {
		bodies[i] = clientActivity{
			ID: a.ID, Type: a.Type, From: clientFrom{a.Sender}, Text: a.Text, Timestamp: a.InsertedAt.UTC(), Attachments: a.Attachments,
			ConversationID: a.ConversationID, ChannelData: orObject(a.Metadata), ReplyToID: a.ReplyToID,
			EditedAt: utc(a.EditedAt), DeletedAt: utc(a.DeletedAt),
		}
	}
	mark := nextWatermark(given, found)
	p, err := jsonReply(http.StatusOK, struct {
		Activities []clientActivity `json:"activities"`
		Watermark  *string          `json:"watermark"`
		HasMore    bool             `json:"has_more"`
	}{bodies, mark, more})
	if err == nil && more {
		p.with("Link", nextLink(c.r.URL, "watermark", *mark))
	}
	return p, err
}
