package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
)

type usersCmd struct {
	Create      usersCreateCmd   `cmd:"" help:"Make a user without a password, who gets in by a link: see users sign-in-link."`
	List        usersListCmd     `cmd:"" help:"List the users of a tenant, or the administrators."`
	Show        usersShowCmd     `cmd:"" help:"Show one."`
	Update      usersUpdateCmd   `cmd:"" help:"Change a user's name or role."`
	Disable     usersDisableCmd  `cmd:"" help:"Keep a user out; all sessions end at once."`
	Enable      usersEnableCmd   `cmd:"" help:"Let a user in again."`
	Delete      usersDeleteCmd   `cmd:"" help:"Remove a user."`
	SetPassword usersPasswordCmd `cmd:"" help:"Set a user's password: that of a file, or a new one that is printed once. All sessions end."`
	SignInLink  usersLinkCmd     `cmd:"" help:"Print a link that signs a user in once, within 15 minutes, without a password."`
	Sessions    usersSessionsCmd `cmd:"" help:"List where a user is signed in."`
	SignOut     usersSignOutCmd  `cmd:"" help:"End one session of a user, or all."`
}

// peopleFlags say whose users.
type peopleFlags struct {
	managementFlags
	Tenant string `help:"Users of this tenant, by id or name. This or --admins is needed." placeholder:"TENANT" xor:"people"`
	Admins bool   `help:"The administrators of the installation, in place of a tenant's users." xor:"people"`
}

// connect finds the hub, and where it keeps those users.
func (f peopleFlags) connect(e *env) (h *hubClient, people string, err error) {
	if f.Tenant == "" && !f.Admins {
		return nil, "", misused("whose users? Pass --tenant TENANT, or --admins")
	}
	if h, err = f.managementFlags.connect(e); err != nil {
		return nil, "", err
	}
	people = "/admin_users"
	if f.Tenant != "" {
		people, err = h.tenantPath(f.Tenant, "users")
	}
	return h, people, err
}

// userFlags name a user.
type userFlags struct {
	peopleFlags
	User string `arg:"" help:"Id or email address of the user."`
}

// connect finds the hub, and where it keeps the user.
func (f userFlags) connect(e *env) (h *hubClient, user string, err error) {
	h, people, err := f.peopleFlags.connect(e)
	if err != nil {
		return nil, "", err
	}
	if isID(f.User) {
		return h, people + "/" + f.User, nil
	}
	found, _, err := h.list(people, url.Values{"email": {f.User}}, 1)
	if err != nil {
		return nil, "", err
	}
	if len(found) == 0 {
		return nil, "", fmt.Errorf("no user has the id or address %q; `server users list` shows them", printable([]byte(f.User)))
	}
	return h, people + "/" + cell(found[0], "id"), nil
}

var userColumns = []column{{"EMAIL", "email"}, {"NAME", "name"}, {"ROLE", "role"}, {"STATUS", "status"}, {"PASSWORD", "has_password"}, {"LAST SIGN-IN", "last_sign_in_at"}, {"ID", "id"}}

// change asks for a user, or for a change, and shows the user.
func (f userFlags) change(e *env, method string, in any) error {
	h, user, err := f.connect(e)
	if err != nil {
		return err
	}
	u, err := h.do(method, user, in)
	if err != nil {
		return err
	}
	return h.show(u, userColumns...)
}

type usersCreateCmd struct {
	peopleFlags
	Email string `arg:"" help:"Email address: the name of the account."`
	Role  string `arg:"" help:"owner, admin, member or viewer of a tenant; super_admin, admin or viewer of the installation."`
	Name  string `help:"The person's name." placeholder:"NAME"`
}

// Help shows an example.
func (usersCreateCmd) Help() string {
	return `Example:

    server users create --tenant acme ada@example.com owner --name "Ada Lovelace"
    server users sign-in-link --tenant acme ada@example.com`
}

func (c usersCreateCmd) Run(e *env) error {
	h, people, err := c.connect(e)
	if err != nil {
		return err
	}
	u, err := h.do(http.MethodPost, people, members{"email": c.Email, "role": c.Role, "name": c.Name})
	if err != nil {
		return err
	}
	return h.show(u, userColumns...)
}

type usersListCmd struct {
	peopleFlags
	Limit int `help:"Most to show; 0: all." default:"50"`
}

func (c usersListCmd) Run(e *env) error {
	h, people, err := c.connect(e)
	if err != nil {
		return err
	}
	found, more, err := h.list(people, nil, c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "No users yet. Make one: server users create --tenant TENANT EMAIL ROLE, or with --admins", userColumns...)
}

type usersShowCmd struct{ userFlags }

func (c usersShowCmd) Run(e *env) error { return c.change(e, http.MethodGet, nil) }

type usersUpdateCmd struct {
	userFlags
	guard
	Name *string `help:"New name." placeholder:"NAME"`
	Role *string `help:"New role." placeholder:"ROLE"`
}

func (c usersUpdateCmd) Run(e *env) error {
	change := members{}
	if c.Name != nil {
		change["name"] = *c.Name
	}
	if c.Role != nil {
		change["role"] = *c.Role
	}
	if len(change) == 0 {
		return errNoChange
	}
	return c.change(e, http.MethodPatch, change)
}

type usersDisableCmd struct {
	userFlags
	guard
}

func (c usersDisableCmd) Run(e *env) error {
	return c.change(e, http.MethodPatch, members{"status": "inactive"})
}

type usersEnableCmd struct {
	userFlags
	guard
}

func (c usersEnableCmd) Run(e *env) error {
	return c.change(e, http.MethodPatch, members{"status": "active"})
}

type usersDeleteCmd struct {
	userFlags
	guard
}

func (c usersDeleteCmd) Run(e *env) error {
	h, user, err := c.connect(e)
	if err != nil {
		return err
	}
	if err := h.remove(user, nil); err != nil {
		return err
	}
	return h.done(nil, "Removed %s.", c.User)
}

type usersPasswordCmd struct {
	userFlags
	PasswordFile string `help:"File with the password; without it one is made." type:"path" placeholder:"FILE"`
	Keep         bool   `help:"Let the user keep it; without this another has to be chosen at the next sign-in."`
}

func (c usersPasswordCmd) Run(e *env) error {
	password := newPassword().Reveal()
	if c.PasswordFile != "" {
		text, err := os.ReadFile(c.PasswordFile)
		if err != nil {
			return fmt.Errorf("password: %w", err)
		}
		password = strings.TrimRight(string(text), "\r\n")
	}
	h, user, err := c.connect(e)
	if err != nil {
		return err
	}
	u, err := h.do(http.MethodPost, user+"/password", members{"password": password, "must_change_password": !c.Keep})
	if err != nil {
		return err
	}
	if c.PasswordFile != "" {
		return h.done(u, "The password of %s is set; all sessions have ended.", cell(u, "email"))
	}
	u["password"] = password
	return h.reveal(u, "password", "The new password of %s.", cell(u, "email"))
}

type usersLinkCmd struct{ userFlags }

func (c usersLinkCmd) Run(e *env) error {
	h, user, err := c.connect(e)
	if err != nil {
		return err
	}
	link, err := h.do(http.MethodPost, user+"/sign_in_link", nil)
	if err != nil {
		return err
	}
	return h.reveal(link, "url", "A link for %s, good once and until %s.", c.User, cell(link, "expires_at"))
}

type usersSessionsCmd struct{ userFlags }

func (c usersSessionsCmd) Run(e *env) error {
	h, user, err := c.connect(e)
	if err != nil {
		return err
	}
	found, err := h.whole(user + "/sessions")
	if err != nil {
		return err
	}
	return h.showList(found, false, "The user is not signed in.", column{"ID", "id"}, column{"FROM", "address"}, column{"SINCE", "opened_at"},
		column{"LAST SEEN", "seen_at"}, column{"ENDS", "expires_at"}, column{"BY LINK", "by_link"}, column{"BROWSER", "user_agent"})
}

type usersSignOutCmd struct {
	userFlags
	Session *idArg `arg:"" optional:"" help:"Id of the session, see users sessions; without it all."`
}

func (c usersSignOutCmd) Run(e *env) error {
	h, user, err := c.connect(e)
	if err != nil {
		return err
	}
	path := user + "/sessions"
	if c.Session != nil {
		path += "/" + c.Session.String()
	}
	if err := h.remove(path, nil); err != nil {
		return err
	}
	return h.done(nil, "Signed out.")
}
