package main

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"converger/internal/tenants"
)

// operatorCmd works straight on the database: it makes the first token of an installation, when nobody can call the
// management API yet.
type operatorCmd struct {
	Create operatorCreateCmd `cmd:"" help:"Make an operator token, for the management API, straight in the database, and print it once."`
	List   operatorListCmd   `cmd:"" help:"List the operator tokens, straight from the database."`
	Revoke operatorRevokeCmd `cmd:"" help:"Revoke a token; running nodes refuse it within a second."`
}

type operatorCreateCmd struct {
	databaseFlag
	Name    string        `arg:"" help:"Whose token it is, for the list and the audit log."`
	Scope   []string      `help:"What it may do: read or write; once for each, or neither for both." enum:"read,write" placeholder:"SCOPE"`
	Expires time.Duration `help:"Life of the token, in hours: 2160h for 90 days; without it the token does not expire." placeholder:"DURATION"`
}

func (c operatorCreateCmd) Run(e *env) error {
	pool, err := c.open(e)
	if err != nil {
		return err
	}
	defer pool.Close()
	n := tenants.NewOperatorToken{Name: c.Name, Scopes: c.Scope}
	if c.Expires > 0 {
		at := time.Now().Add(c.Expires)
		n.ExpiresAt = &at
	}
	token, text, err := tenants.NewStore(pool).CreateOperatorToken(e.ctx, byCommandLine(), n)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stderr, "Token %s (%s). It is shown this once:\n", token.ID, token.Name)
	fmt.Fprintln(e.stdout, text.Reveal())
	return nil
}

type operatorListCmd struct {
	databaseFlag
}

func (c operatorListCmd) Run(e *env) error {
	pool, err := c.open(e)
	if err != nil {
		return err
	}
	defer pool.Close()
	tokens, err := tenants.NewStore(pool).ListOperatorTokens(e.ctx)
	if err != nil {
		return err
	}
	if len(tokens) == 0 {
		fmt.Fprintln(e.stdout, "No tokens yet. Make one: server operator create NAME")
		return nil
	}
	w := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tNAME\tBEGINS WITH\tSCOPES\tEXPIRES\tREVOKED\tLAST USED")
	for _, t := range tokens {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", t.ID, t.Name, t.Prefix, strings.Join(t.Scopes, ","), when(t.ExpiresAt), when(t.RevokedAt), when(t.LastUsedAt))
	}
	return w.Flush()
}

// when shows an instant, or a dash for none.
func when(t *time.Time) string {
	if t == nil {
		return "–"
	}
	return t.UTC().Format(time.RFC3339)
}

type operatorRevokeCmd struct {
	databaseFlag
	ID idArg `arg:"" help:"Id of the token, see operator list."`
}

func (c operatorRevokeCmd) Run(e *env) error {
	pool, err := c.open(e)
	if err != nil {
		return err
	}
	defer pool.Close()
	token, err := tenants.NewStore(pool).RevokeOperatorToken(e.ctx, byCommandLine(), c.ID.UUID, time.Now(), false)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "Revoked %s (%s).\n", token.ID, token.Name)
	return nil
}
