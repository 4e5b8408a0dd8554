package main

import (
	"net/http"
	"time"
)

// tokensCmd is for operators who have a token; the first one comes from `server operator create`.
type tokensCmd struct {
	Create tokensCreateCmd `cmd:"" help:"Make another operator token by means of yours, and print it once; it can do no more than yours."`
	List   tokensListCmd   `cmd:"" help:"List the operator tokens."`
	Revoke tokensRevokeCmd `cmd:"" help:"Revoke a token; running nodes refuse it within a second."`
}

type tokensCreateCmd struct {
	managementFlags
	Name    string        `arg:"" help:"Whose token it is, for the list and the audit log."`
	Scope   []string      `help:"What it may do: read or write, once for each; without it what yours may." enum:"read,write" placeholder:"SCOPE"`
	Expires time.Duration `help:"Life of the token, in hours: 2160h for 90 days; without it as long as yours." placeholder:"DURATION"`
}

func (c tokensCreateCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	in := members{"name": c.Name, "expires_at": expiry(c.Expires)}
	if c.Scope != nil {
		in["scopes"] = c.Scope
	}
	t, err := h.do(http.MethodPost, "/operator_tokens", in)
	if err != nil {
		return err
	}
	return h.reveal(t, "token", "Token %s (%s).", cell(t, "id"), cell(t, "name"))
}

type tokensListCmd struct{ managementFlags }

func (c tokensListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	found, err := h.whole("/operator_tokens")
	if err != nil {
		return err
	}
	return h.showList(found, false, "There are no tokens.", column{"ID", "id"}, column{"NAME", "name"}, column{"BEGINS WITH", "prefix"},
		column{"SCOPES", "scopes"}, column{"EXPIRES", "expires_at"}, column{"REVOKED", "revoked_at"}, column{"LAST USED", "last_used_at"})
}

type tokensRevokeCmd struct {
	managementFlags
	ID      idArg         `arg:"" help:"Id of the token, see tokens list."`
	Overlap time.Duration `help:"How long it works on, such as 24h; without it it ends at once." placeholder:"DURATION"`
	Force   bool          `help:"Also when it is your own, or the last that may write."`
}

func (c tokensRevokeCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	t, err := h.do(http.MethodPost, "/operator_tokens/"+c.ID.String()+"/revoke", members{"force": c.Force, "overlap_seconds": int(c.Overlap.Seconds())})
	if err != nil {
		return err
	}
	return h.done(t, "Token %s (%s) is revoked as of %s.", cell(t, "id"), cell(t, "name"), cell(t, "revoked_at"))
}
