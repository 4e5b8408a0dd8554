package main

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

type keysCmd struct {
	Create keysCreateCmd `cmd:"" help:"Make an API key of a tenant and print it, once."`
	List   keysListCmd   `cmd:"" help:"List a tenant's keys."`
	Rotate keysRotateCmd `cmd:"" help:"Make a key's successor and print it, once; the old key works on for a while."`
	Revoke keysRevokeCmd `cmd:"" help:"Revoke a key; running nodes refuse it within a second."`
}

type keysCreateCmd struct {
	managementFlags
	tenantArg
	Name    string        `arg:"" help:"What the key is for."`
	Scope   []string      `help:"What it may do: read or write; once for each, or neither for both." enum:"read,write" placeholder:"SCOPE"`
	Expires time.Duration `help:"Life of the key, in hours: 2160h for 90 days; without it the key does not expire." placeholder:"DURATION"`
}

// Help shows an example.
func (keysCreateCmd) Help() string {
	return `The key alone goes to standard output, so that a script can keep it:

    KEY=$(server keys create acme "order service" --scope read --scope write --expires 2160h)`
}

func (c keysCreateCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "keys")
	if err != nil {
		return err
	}
	in := members{"name": c.Name, "expires_at": expiry(c.Expires)}
	if c.Scope != nil {
		in["scopes"] = c.Scope
	}
	k, err := h.do(http.MethodPost, path, in)
	if err != nil {
		return err
	}
	return h.reveal(k, "api_key", "Key %s (%s).", cell(k, "id"), cell(k, "name"))
}

type keysListCmd struct {
	managementFlags
	tenantArg
}

func (c keysListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "keys")
	if err != nil {
		return err
	}
	found, err := h.whole(path)
	if err != nil {
		return err
	}
	return h.showList(found, false, "No keys yet. Make one: server keys create TENANT NAME", column{"ID", "id"}, column{"NAME", "name"},
		column{"BEGINS WITH", "prefix"}, column{"SCOPES", "scopes"}, column{"EXPIRES", "expires_at"}, column{"REVOKED", "revoked_at"}, column{"LAST USED", "last_used_at"})
}

// keyArgs name a key.
type keyArgs struct {
	tenantArg
	Key idArg `arg:"" help:"Id of the key, see keys list."`
}

type keysRotateCmd struct {
	managementFlags
	keyArgs
	Overlap time.Duration `help:"How long the old key works on." default:"24h"`
}

// Help shows an example.
func (keysRotateCmd) Help() string {
	return `The successor has the old key's name, scopes and expiry. Example:

    server keys rotate acme 01a22bec-ac96-7d00-b66c-85ff5215fb3a --overlap 72h`
}

// Run makes the successor first: whatever fails, the caller has a key that works.
func (c keysRotateCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "keys")
	if err != nil {
		return err
	}
	keys, err := h.whole(path)
	if err != nil {
		return err
	}
	var old members
	for _, k := range keys {
		if cell(k, "id") == c.Key.String() {
			old = k
		}
	}
	switch {
	case old == nil:
		return fmt.Errorf("the tenant has no key %s; `server keys list` shows them", c.Key)
	case old["revoked_at"] != nil:
		return fmt.Errorf("the key %s is revoked, or about to be; make a new one with `server keys create`", c.Key)
	}
	k, err := h.do(http.MethodPost, path, members{"name": old["name"], "scopes": old["scopes"], "expires_at": old["expires_at"]})
	if err != nil {
		return err
	}
	_, err = h.do(http.MethodPost, path+"/"+c.Key.String()+"/revoke", members{"overlap_seconds": int(c.Overlap.Seconds())})
	if err != nil {
		err = fmt.Errorf("the new key is made, but the old one goes on: %w", err)
	}
	return errors.Join(h.reveal(k, "api_key", "Key %s (%s). The old one works for another %v.", cell(k, "id"), cell(k, "name"), c.Overlap), err)
}

type keysRevokeCmd struct {
	managementFlags
	keyArgs
	Overlap time.Duration `help:"How long it works on, such as 24h; without it it ends at once." placeholder:"DURATION"`
}

func (c keysRevokeCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "keys", c.Key.String(), "revoke")
	if err != nil {
		return err
	}
	k, err := h.do(http.MethodPost, path, members{"overlap_seconds": int(c.Overlap.Seconds())})
	if err != nil {
		return err
	}
	return h.done(k, "Key %s (%s) is revoked as of %s.", cell(k, "id"), cell(k, "name"), cell(k, "revoked_at"))
}
