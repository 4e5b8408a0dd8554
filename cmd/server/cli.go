package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"
)

// errUsage is returned for a command line that could not be read; what was wrong is printed already.
var errUsage = errors.New("usage")

// misused says what is wrong with a command line whose parts could be read.
type misused string

func (m misused) Error() string { return string(m) }
func (misused) ExitCode() int   { return exitUsage }

// errNoChange is of a command that was told nothing to change.
const errNoChange = misused("what is to be changed? Pass at least one of the flags that --help lists")

// idArg is an argument or a flag that names something by its id alone.
type idArg struct{ uuid.UUID }

// UnmarshalText takes an id in the one form in which the API writes them. What is wrong shows before anybody is asked.
func (i *idArg) UnmarshalText(text []byte) error {
	if !isID(string(text)) {
		return fmt.Errorf("must be an id such as 01a22bed-4fce-7919-9f38-f5f2e99b7618, not %q", text)
	}
	return i.UUID.UnmarshalText(text)
}

// decodeDuration reads a duration, and says in our words what it is.
func decodeDuration(ctx *kong.DecodeContext, target reflect.Value) error {
	var text string
	if err := ctx.Scan.PopValueInto("duration", &text); err != nil {
		return err
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("must be a time such as 90s, 15m or 24h, not %q", text)
	}
	target.SetInt(int64(d))
	return nil
}

// isID tells an id from a name.
func isID(text string) bool { return len(text) == 36 && uuid.Validate(text) == nil }

// env is what a command may touch of the world.
type env struct {
	ctx            context.Context
	getenv         func(string) string
	stdout, stderr io.Writer

	ifMatch string // what --if-match says, see guard
}

// cli is the grammar of the command line. Each command's Run method stands in the file of its subject.
type cli struct {
	Dev      devCmd      `cmd:"" help:"Run a hub on a private database with a demo tenant, for trying out and for development."`
	Serve    serveCmd    `cmd:"" help:"Run the hub, configured by environment variables: server config doc lists them."`
	Migrate  migrateCmd  `cmd:"" help:"Bring the database to this version's schema, or show where it stands."`
	Config   configCmd   `cmd:"" help:"Check the configuration, or explain every variable."`
	Operator operatorCmd `cmd:"" help:"Make and revoke the tokens of operators, straight in the database."`
	Secrets  secretsCmd  `cmd:"" help:"See which keys seal the stored secrets, and change the key, straight in the database."`
	Admin    adminCmd    `cmd:"" help:"Make administrators and let them in again, straight in the database."`

	Tenant        tenantCmd        `cmd:"" group:"manage" help:"Make, show, change and suspend tenants."`
	Channels      channelsCmd      `cmd:"" group:"manage" help:"Make, change, pause and delete the channels of tenants."`
	Keys          keysCmd          `cmd:"" group:"manage" help:"Make, rotate and revoke the API keys of tenants."`
	Rules         rulesCmd         `cmd:"" group:"manage" help:"Show and change the routing rules of tenants, which copy activities of a channel to others."`
	Limits        limitsCmd        `cmd:"" group:"manage" help:"Show and change the limits of tenants."`
	Users         usersCmd         `cmd:"" group:"manage" help:"Make and change the people who sign in to the pages."`
	Deliveries    deliveriesCmd    `cmd:"" group:"manage" help:"Look at deliveries, and send failed ones again."`
	Conversations conversationsCmd `cmd:"" group:"manage" help:"Look at conversations and what was said in them; close and reopen them."`
	Inbound       inboundCmd       `cmd:"" group:"manage" help:"Look at received webhooks, and process one again."`
	Ranges        rangesCmd        `cmd:"" group:"manage" help:"Deny ranges of addresses, or exempt them from limits on addresses."`
	Tokens        tokensCmd        `cmd:"" group:"manage" help:"Make and revoke operator tokens."`
	Audit         auditCmd         `cmd:"" group:"manage" help:"Show who changed what, newest first."`

	Simulate simulateCmd `cmd:"" help:"Play a provider or a receiver, to try a hub without one."`
	Loadtest loadtestCmd `cmd:"" help:"Measure a hub under load."`
	Version  versionCmd  `cmd:"" help:"Print the version."`

	ShowVersion kong.VersionFlag `name:"version" help:"Print the version."`
}

// run is the whole program but for the process around it: the tests start it the same way.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) error {
	e := &env{ctx: ctx, getenv: getenv, stdout: stdout, stderr: stderr}
	exited := false
	parser, err := kong.New(&cli{},
		kong.Name("server"),
		kong.Description("Converger: a self-hosted, multi-tenant messaging hub."),
		kong.UsageOnError(),
		kong.ExplicitGroups([]kong.Group{{Key: "manage", Title: "Manage a running hub (--server, CONVERGER_URL and CONVERGER_TOKEN):"}}),
		kong.Vars{"version": "converger " + version},
		kong.Writers(stdout, stderr),
		kong.Bind(e),
		kong.TypeMapper(reflect.TypeFor[time.Duration](), kong.MapperFunc(decodeDuration)),
		kong.Exit(func(int) { exited = true }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
	)
	if err != nil {
		return err
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	kctx, err := parser.Parse(args)
	if exited { // --help
		return nil
	}
	if err != nil {
		command := "server"
		if parse, ok := errors.AsType[*kong.ParseError](err); ok {
			if node := parse.Context.Selected(); node != nil {
				command = node.FullPath()
			}
		}
		said := err.Error()
		if lacks, ok := strings.CutPrefix(said, `expected "<`); ok { // as kong puts it
			said = "missing <" + strings.TrimSuffix(lacks, `"`)
		}
		fmt.Fprintf(stderr, "server: %s\nTry: %s --help\n", said, command)
		return errUsage
	}
	return kctx.Run()
}

type versionCmd struct{}

func (versionCmd) Run(e *env) error {
	fmt.Fprintln(e.stdout, "converger", version)
	return nil
}

type configCmd struct {
	Check configCheckCmd `cmd:"" help:"Read the environment and print every problem at once."`
	Doc   configDocCmd   `cmd:"" help:"Print the table of all variables (Markdown)."`
}

type configCheckCmd struct{}

func (configCheckCmd) Run(e *env) error {
	if _, err := LoadConfig(e.getenv); err != nil {
		return err
	}
	fmt.Fprintln(e.stdout, "The configuration is complete and valid.")
	return nil
}

type configDocCmd struct{}

func (configDocCmd) Run(e *env) error {
	WriteConfigDoc(e.stdout)
	return nil
}
